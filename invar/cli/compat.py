"""The peers' command lines: one table per peer, spelling → our option, a notice or a refusal.

Nothing is dropped in silence. A spelling that means one of our options is rewritten to it; one that
sets an engine option under its own name goes to `invar.config`, which says whether it does
something here (for most of vLLM's, `invar.peer_options` has the reason); one with nothing to do
here costs one line on stderr; one that would change the answer and is not built is refused. Names:
vLLM 0.33 `vllm serve`, SGLang 0.5.23, llama.cpp b11434.

The page docs/cli_compat.md is made from these tables (`python -m invar.cli.compat_page`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from invar.peer_options import ABSENT, INERT

RUN = ("run",)
SERVE = ("serve",)
BOTH = ("run", "serve")


class Takes(Enum):
    """Whether a value follows the spelling."""

    NOTHING = "nothing"
    VALUE = "value"
    SWITCH = "switch"  # on, off, auto … may follow


@dataclass(frozen=True)
class Rule:
    """What some spellings of a peer come to. Exactly one of option, engine, notice, refusal."""

    spellings: tuple[str, ...]
    takes: Takes = Takes.VALUE
    option: str | None = None  # ours; a value goes with it
    prefix: str = ""  # put before the value
    values: Mapping[str, str] | None = None  # those that mean something here → ours
    engine: str | None = None  # name of an engine option, as invar.config knows it
    engine_value: object = None  # of a spelling without a value
    notice: str | None = None
    refusal: str | None = None
    neutral: tuple[str, ...] = ()  # values at which notice and refusal have nothing to say
    commands: tuple[str, ...] = BOTH


def means(
    option: str,
    *spellings: str,
    prefix: str = "",
    values: Mapping[str, str] | None = None,
    commands: tuple[str, ...] = BOTH,
) -> Rule:
    return Rule(spellings, option=option, prefix=prefix, values=values, commands=commands)


def switches(option: str, *spellings: str, commands: tuple[str, ...] = BOTH) -> Rule:
    return Rule(spellings, Takes.NOTHING, option=option, commands=commands)


def sets(engine: str, *spellings: str) -> Rule:
    return Rule(spellings, Takes.VALUE, engine=engine)


def turns(engine: str, value: object, *spellings: str) -> Rule:
    return Rule(spellings, Takes.NOTHING, engine=engine, engine_value=value)


def inert(
    notice: str, *spellings: str, takes: Takes = Takes.VALUE, neutral: tuple[str, ...] = ()
) -> Rule:
    return Rule(spellings, takes, notice=notice, neutral=neutral)


def refused(
    reason: str,
    *spellings: str,
    takes: Takes = Takes.VALUE,
    neutral: tuple[str, ...] = (),
    commands: tuple[str, ...] = BOTH,
) -> Rule:
    return Rule(spellings, takes, refusal=reason, neutral=neutral, commands=commands)


NO_GPU = "there is no GPU here, the model runs on the CPU"
IN_MEMORY = "weights are in the machine's memory already"
ALWAYS = "it is always so here"
ROPE = "rope is what the model file states"
SAMPLER = "this sampler is not built; --temperature, --top-k, --top-p, --min-p and penalties are"
SPECULATION = "no speculation yet; the answers are the same without it"
ADAPTERS = "adapters come with a later version"
POOLING = "pooling models come with a later version"
WHOLE_TEXTS = "the terminal shows whole texts; invar serve reads them"
TERMINAL = "the terminal needs no such setting here"
LATER = "it comes with a later version"
TLS = "the defaults of OpenSSL are used; put a proxy in front for others"
PER_REQUEST = "each request asks for it itself"
KV_TYPES = {"bf16": "bf16", "f16": "fp16", "q8_0": "int8"}  # K and V of a model are stored alike
SAMPLING_DEFAULTS = {"model": "auto", "openai": "vllm"}
KV_STORE = "what leaves the KV cache is kept on disk, as --kv-store and --kv-store-size say"
NO_TEXT_LOGGED = "prompts and answers stay out of logs"

VLLM: tuple[Rule, ...] = (
    sets("tensor_parallel_size", "--tensor-parallel-size", "-tp"),
    sets("pipeline_parallel_size", "--pipeline-parallel-size", "-pp"),
    sets("data_parallel_size", "--data-parallel-size", "-dp"),
    turns("enable_expert_parallel", True, "--enable-expert-parallel", "-ep"),
    sets("dtype", "--dtype"),
    sets("quantization", "--quantization", "-q"),
    # Room for what leaves the accelerator's memory; here for what leaves the KV cache.
    sets("swap_space", "--swap-space", "--kv-offloading-size"),
    sets("optimization_level", "-O", "--optimization-level"),
    turns("optimization_level", 0, "-O0"),
    turns("optimization_level", 1, "-O1"),
    turns("optimization_level", 2, "-O2"),
    turns("optimization_level", 3, "-O3"),
    sets("structured_outputs_config", "--structured-outputs-config"),
    *(
        turns(f"guided_decoding_{name}", value, f"--{no}guided-decoding-{name.replace('_', '-')}")
        for name in ("disable_any_whitespace", "disable_additional_properties")
        for value, no in ((True, ""), (False, "no-"))
    ),
    turns("enforce_eager", True, "--enforce-eager"),
    turns("enforce_eager", False, "--no-enforce-eager"),
    turns("enable_chunked_prefill", True, "--enable-chunked-prefill"),
    turns("enable_chunked_prefill", False, "--no-enable-chunked-prefill"),
    turns("enable_prefix_caching", True, "--enable-prefix-caching"),
    turns("enable_prefix_caching", False, "--no-enable-prefix-caching"),
    means("--log-level", "--uvicorn-log-level"),
    means("--threads", "--num-threads"),
    switches("--no-access-log", "--disable-uvicorn-access-log", commands=SERVE),
    switches(
        "--no-access-log", "--disable-log-requests", "--no-enable-log-requests", commands=SERVE
    ),
    inert("each request has its line, without text", "--enable-log-requests", takes=Takes.NOTHING),
    refused("code of others is not loaded", "--tool-parser-plugin", "--reasoning-parser-plugin"),
    refused("the server runs no tools", "--tool-server"),
    refused(WHOLE_TEXTS, "--tool-call-parser", "--reasoning-parser", commands=RUN),
    inert(ALWAYS, "--enable-auto-tool-choice", takes=Takes.NOTHING),
    inert(ALWAYS, "--exclude-tools-when-tool-choice-none", takes=Takes.NOTHING),
    refused(ADAPTERS, "--lora-modules", "--prompt-adapters"),
    inert("there is one process", "--disable-frontend-multiprocessing", takes=Takes.NOTHING),
    refused("there is one process", "--headless", takes=Takes.NOTHING),
    inert(ALWAYS, "--enable-request-id-headers", takes=Takes.NOTHING),
    inert(ALWAYS, "--enable-prompt-tokens-details", takes=Takes.NOTHING),
    inert(ALWAYS, "--log-error-stack", takes=Takes.NOTHING),
    inert(NO_TEXT_LOGGED, "--enable-log-outputs", "--enable-log-deltas", takes=Takes.NOTHING),
    inert("see --log-level and --no-access-log", "--log-config-file"),
    inert("see --log-level and --no-access-log", "--disable-access-log-for-endpoints"),
    inert("see /metrics", "--enable-server-load-tracking", takes=Takes.NOTHING),
    inert("there are no such pages", "--disable-fastapi-docs", takes=Takes.NOTHING),
    inert("there are no such pages", "--enable-offline-docs", takes=Takes.NOTHING),
    inert("either form of content is read", "--chat-template-content-format", neutral=("auto",)),
    inert("system_fingerprint is of engine and model", "--fingerprint-mode"),
    inert("requests are read by httptools", "--h11-max-incomplete-event-size"),
    inert("requests are read by httptools", "--h11-max-header-count"),
    refused("answers are the assistant's", "--response-role", neutral=("assistant",)),
    refused(PER_REQUEST, "--default-chat-template-kwargs", neutral=("{}",)),
    refused(PER_REQUEST, "--enable-force-include-usage", takes=Takes.NOTHING),
    refused(LATER, "--return-tokens-as-token-ids", takes=Takes.NOTHING),
    refused("the template is the server's", "--trust-request-chat-template", takes=Takes.NOTHING),
    refused(LATER, "--enable-tokenizer-info-endpoint", "--grpc", takes=Takes.NOTHING),
    refused("browsers may send them all", "--allowed-methods", neutral=('["*"]',)),
    refused("browsers may send them all", "--allowed-headers", neutral=('["*"]',)),
    refused("browsers send no cookies here", "--allow-credentials", takes=Takes.NOTHING),
    refused(TLS, "--ssl-ciphers"),
    refused("certificates are read at start", "--enable-ssl-refresh", takes=Takes.NOTHING),
    refused(LATER, "--config", "--root-path", "--middleware", "--uds"),
)

SGLANG: tuple[Rule, ...] = (
    means("--model", "--model-path"),
    means("--tokenizer", "--tokenizer-path"),
    means("--max-model-len", "--context-length"),
    means("--max-num-seqs", "--max-running-requests"),
    means("--max-num-batched-tokens", "--chunked-prefill-size"),
    means("--gpu-memory-utilization", "--mem-fraction-static"),
    means("--seed", "--random-seed"),
    sets("tensor_parallel_size", "--tp", "--tp-size"),
    sets("pipeline_parallel_size", "--pp", "--pp-size"),
    sets("data_parallel_size", "--dp", "--dp-size"),
    sets("hf_overrides", "--json-model-override-args"),
    inert("the radix tree is on", "--enable-radix-cache", takes=Takes.NOTHING),
    turns("enable_prefix_caching", False, "--disable-radix-cache"),
    sets("swap_space", "--hicache-size"),
    inert(KV_STORE, "--enable-hierarchical-cache", "--enable-lmcache", takes=Takes.NOTHING),
    inert(KV_STORE, "--hicache-ratio", "--hicache-write-policy", "--hicache-io-backend"),
    inert(KV_STORE, "--hicache-mem-layout", "--hicache-storage-prefetch-policy"),
    inert(KV_STORE, "--hicache-storage-backend", "--hicache-storage-backend-extra-config"),
    inert("there is nothing to compile", "--enable-torch-compile", takes=Takes.NOTHING),
    inert("there are no graphs to capture", "--disable-cuda-graph", takes=Takes.NOTHING),
    inert("there are no graphs to capture", "--cuda-graph-max-bs"),
    inert(ALWAYS, "--enable-metrics", "--enable-cache-report", takes=Takes.NOTHING),
    inert(ALWAYS, "--enable-mixed-chunk", takes=Takes.NOTHING),
    inert(ALWAYS, "--enable-deterministic-inference", takes=Takes.NOTHING),
    inert("a step has nothing to overlap with", "--disable-overlap-schedule", takes=Takes.NOTHING),
    inert("there is no warm-up to skip", "--skip-server-warmup", takes=Takes.NOTHING),
    sets("scheduling_policy", "--schedule-policy"),
    inert("nothing is guessed ahead", "--schedule-conservativeness"),
    means("--generation-config", "--sampling-defaults", values=SAMPLING_DEFAULTS),
    means("--override-generation-config", "--preferred-sampling-params"),
    inert("the token budget of a step covers it", "--max-prefill-tokens"),
    inert("KV memory is planned from the budget", "--max-total-tokens"),
    inert("the backend's pages hold 32 tokens", "--page-size", neutral=("32",)),
    inert("there is one kernel per instruction set", "--sampling-backend"),
    inert("there is one grammar engine", "--grammar-backend"),
    inert(SPECULATION, "--speculative-algorithm", "--speculative-draft-model-path"),
    inert(SPECULATION, "--speculative-num-steps", "--speculative-eagle-topk"),
    inert(SPECULATION, "--speculative-num-draft-tokens"),
    refused(ADAPTERS, "--lora-paths"),
    refused(POOLING, "--is-embedding", takes=Takes.NOTHING),
    means("--max-num-queued-reqs", "--max-queued-requests", commands=SERVE),
    refused(LATER, "--admin-api-key"),
    refused(LATER, "--disaggregation-mode"),
    refused("it needs more than one machine", "--dist-init-addr"),
)

TENSORRT_LLM: tuple[Rule, ...] = (
    means("--max-num-seqs", "--max-batch-size"),
    means("--max-num-batched-tokens", "--max-num-tokens"),
    means("--max-model-len", "--max-seq-len"),
    means("--gpu-memory-utilization", "--kv-cache-free-gpu-memory-fraction"),
    sets("tensor_parallel_size", "--tensor-parallel"),
    sets("device", "--backend"),
)

LLAMA_CPP: tuple[Rule, ...] = (
    means("--max-model-len", "--ctx-size"),
    means("--model", "--hf-repo", "-hf", "-hfr", prefix="hf:"),
    means("--served-model-name", "--alias", "-a", commands=SERVE),
    means("--ssl-keyfile", "--ssl-key-file", commands=SERVE),
    means("--ssl-certfile", "--ssl-cert-file", commands=SERVE),
    means("--max-tokens", "--predict", "--n-predict", commands=RUN),
    means("--repetition-penalty", "--repeat-penalty", commands=RUN),
    means("--seed", "-s"),
    Rule(("--color", "-co"), Takes.SWITCH, option="--color", commands=RUN),
    means("--system", "--system-prompt", commands=RUN),
    means("--chat-template", "--chat-template-file"),
    means("--max-num-batched-tokens", "--batch-size", "-b"),
    means("--max-num-seqs", "--parallel", "-np"),
    switches("--raw", "-no-cnv", "--no-conversation", commands=RUN),
    inert(NO_GPU, "-ngl", "--gpu-layers", "--n-gpu-layers", neutral=("0",)),
    inert(NO_GPU, "-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu"),
    inert(NO_GPU, "-dev", neutral=("none", "cpu")),
    inert(NO_GPU, "-nkvo", "--no-kv-offload", takes=Takes.NOTHING),
    inert(NO_GPU, "-ot", "--override-tensor", "-ncmoe", "--n-cpu-moe"),
    inert(NO_GPU, "-cmoe", "--cpu-moe", takes=Takes.NOTHING),
    inert("attention always runs in tiles", "-fa", "--flash-attn", takes=Takes.SWITCH),
    inert("batching is always continuous", "-cb", "--cont-batching", takes=Takes.NOTHING),
    inert("batching is always continuous", "-nocb", "--no-cont-batching", takes=Takes.NOTHING),
    inert("one budget of tokens a step serves both", "-ub", "--ubatch-size"),
    inert("one pool of threads serves both", "-tb", "--threads-batch", "--threads-http"),
    means("--kv-cache-dtype", "-ctk", "--cache-type-k", "-ctv", "--cache-type-v", values=KV_TYPES),
    inert(IN_MEMORY, "--mlock", "--no-mmap", "--mmap", "--no-repack", takes=Takes.NOTHING),
    inert(IN_MEMORY, "-lm", "--load-mode", "--numa", "--fit", "--fit-target", "--fit-ctx"),
    inert("files are always checked", "--check-tensors", takes=Takes.NOTHING),
    inert("templates are always jinja", "--jinja", takes=Takes.NOTHING),
    inert("it chats when there is no -p", "-cnv", "--conversation", takes=Takes.NOTHING),
    inert("it chats when there is no -p", "-i", "--interactive", takes=Takes.NOTHING),
    inert("with -p there is one answer", "-st", "--single-turn", takes=Takes.NOTHING),
    inert("there is no warm-up to skip", "--warmup", "--no-warmup", takes=Takes.NOTHING),
    inert("see --log-level", "-v", "--verbose", "--log-verbose", takes=Takes.NOTHING),
    inert("see --log-level", "-lv", "--verbosity", "--log-verbosity"),
    inert(TERMINAL, "--simple-io", "--no-display-prompt", "--log-disable", takes=Takes.NOTHING),
    inert("a full context ends the answer", "--no-context-shift", takes=Takes.NOTHING),
    inert("a full context ends the answer", "--keep", neutral=("0", "-1")),
    inert(ALWAYS, "--metrics", "--cache-prompt", takes=Takes.NOTHING),
    inert("there is no web page to switch off", "--no-webui", "--no-ui", takes=Takes.NOTHING),
    inert("see /metrics", "--slots", "--props", "--no-slots", takes=Takes.NOTHING),
    inert(SPECULATION, "-md", "--model-draft", "--spec-draft-model", "--spec-type"),
    inert(SPECULATION, "--draft-max", "--draft-min", "--spec-draft-n-max", "--spec-draft-n-min"),
    refused("a full context ends the answer", "--context-shift", takes=Takes.NOTHING),
    refused("one machine runs the model", "--rpc"),
    refused("the model is what its file says", "--override-kv"),
    refused(ROPE, "--rope-scaling", neutral=("none",)),
    refused(ROPE, "--rope-scale", "--rope-freq-base", "--rope-freq-scale"),
    refused(ROPE, "--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor"),
    refused(SAMPLER, "--samplers", "--top-nsigma", "--adaptive-target"),
    refused(SAMPLER, "--xtc-probability", neutral=("0", "0.0")),
    refused(SAMPLER, "--typical", neutral=("1", "1.0")),
    refused(SAMPLER, "--mirostat", "--dry-multiplier", "--dynatemp-range", neutral=("0", "0.0")),
    refused("penalties look at the whole text", "--repeat-last-n", neutral=("-1",)),
    refused("the API has logit_bias", "-l", "--logit-bias"),
    refused(PER_REQUEST, "--grammar", "--grammar-file", commands=SERVE),
    refused(PER_REQUEST, "-j", "--json-schema", "-jf", "--json-schema-file", commands=SERVE),
    inert("thoughts are told from answers", "--reasoning-format", neutral=("auto", "deepseek")),
    refused(ADAPTERS, "--lora", "--lora-scaled", "--control-vector"),
    refused(POOLING, "--embedding", "--embeddings", "--rerank", takes=Takes.NOTHING),
    refused("images come with a later version", "--mmproj", "-mm", "--image"),
    refused("pull the file first and give its path", "-mu", "--model-url"),
    refused("text is taken as it is", "-e", "--escape", takes=Takes.NOTHING),
    refused("the chat template does it", "--in-prefix", "--in-suffix", "-r", "--reverse-prompt"),
)


def named_alike(*tables: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """vLLM's flags are its engine options with hyphens: those that no table spells out."""
    taken = {spelling for table in tables for rule in table for spelling in rule.spellings}
    rules: list[Rule] = []
    for name, (off, _) in sorted({**INERT, **ABSENT}.items()):
        flag = "--" + name.replace("_", "-")
        if any(value is False for value in off):
            rules += [turns(name, True, flag), turns(name, False, f"--no-{flag[2:]}")]
        else:
            rules.append(sets(name, flag))
    return tuple(rule for rule in rules if not taken.intersection(rule.spellings))


PEERS: Mapping[str, tuple[Rule, ...]] = {
    "vLLM": VLLM + named_alike(VLLM, SGLANG, TENSORRT_LLM, LLAMA_CPP),
    "SGLang": SGLANG,
    "TensorRT-LLM": TENSORRT_LLM,
    "llama.cpp": LLAMA_CPP,
}
