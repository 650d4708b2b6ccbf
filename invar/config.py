"""Every option of the engine: one spelling (vLLM's), validated once.

Three kinds of names exist. Fields of `EngineConfig` mean something here. Names in `INERT` belong to
a peer and have nothing to do here: they are accepted with one line on the logger. Names in `ABSENT`
would change answers or placement and are not built: they are refused unless they are off. Anything
else is refused with the nearest known name. The tables are in `invar.peer_options`.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from invar.peer_options import (
    ABSENT,
    INERT,
    INERT_FIELDS,
    LOAD_FORMATS,
    NO_LOAD_FORMATS,
)

logger = logging.getLogger("invar")

DEFAULT_MODEL = "smollm2"
DEFAULT_MEMORY_FRACTION = 0.9
DEFAULT_NUM_SEQS = 64
# KV memory when neither gpu_memory_utilization nor kv_cache_memory_bytes is given: enough for
# dozens of chats with a small model, and a laptop stays usable. vLLM's CPU backend starts with the
# same 4 GiB (VLLM_CPU_KVCACHE_SPACE).
DEFAULT_KV_BYTES = 4 << 30

POLICIES = ("fcfs", "priority", "lpm", "fair")

DEFAULT_KV_STORE_BYTES = 4 << 30

NOTICE = "%s=%r has nothing to do here: %s"  # its arguments stay apart: the CLI says the flag typed

# kv_cache_dtype, in the peers' words and our own → the format in which K and V are stored.
KV_FORMATS: Mapping[str, str] = {
    "auto": "bf16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "int8": "int8",
    "int8_per_token_head": "int8",
}

# Values that the options with a choice may have; None is "not given" where it is the default.
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "scheduling_policy": POLICIES,
    "dtype": ("auto", "bfloat16", "float16", "float32", "half", "float"),
    "kv_cache_dtype": tuple(KV_FORMATS),
    "enable_chunked_prefill": (None, True, False),
    "enable_prefix_caching": (None, True, False),
    "enforce_eager": (True, False),
    "kv_store_salted": (True, False),
    "paces_prompts": (True, False),
    "guided_decoding_disable_any_whitespace": (True, False),
    "guided_decoding_disable_additional_properties": (True, False),
}

# Keys of vLLM's structured_outputs_config and the values they may have. None: "not given".
FORM_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (None, True, False),
    "disable_additional_properties": (None, True, False),
    "disable_fallback": (None, True, False),
    "backend": (None, "auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"),
    "reasoning_parser": (None, ""),
    "reasoning_parser_plugin": (None, ""),
    "enable_in_reasoning": (None, False),
}


def check_names(
    given: Iterable[str],
    known: Iterable[str],
    what: str,
    error: type[Exception] = TypeError,
) -> None:
    """Raises an error for the first name that is not known, with the nearest one that is."""
    known_names = sorted(known)
    for name in given:
        if name in known_names:
            continue
        nearest = difflib.get_close_matches(name, known_names, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise error(f"{what}: unknown name {name!r}{hint}")


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with. Sizes are in tokens, requests or bytes as named."""

    model: str = DEFAULT_MODEL  # path, or a name that weights.sources resolves
    revision: str | None = None  # of the model's repository on a hub
    load_format: str = "auto"  # gguf, safetensors, or what there is, GGUF first
    tokenizer: str | None = None  # another file to take the tokenizer from
    tokenizer_revision: str | None = None  # of that one's repository
    served_model_name: str | tuple[str, ...] | None = None
    chat_template: str | None = None  # text of a template, in place of the file's own
    generation_config: str = "auto"  # of sampling: the model's own, "vllm": none, or a path
    override_generation_config: Mapping[str, Any] | None = None  # in its words; comes before it
    max_model_len: int | None = None  # None: the model's own, lowered to what KV memory holds
    max_num_seqs: int = DEFAULT_NUM_SEQS
    max_num_batched_tokens: int = 512
    gpu_memory_utilization: float | None = None  # of available memory, weights and KV together
    kv_cache_memory_bytes: int | None = None  # KV memory itself; comes before the fraction
    num_threads: int | None = None  # None: from affinity and cgroup
    scheduling_policy: str = "fcfs"
    seed: int | None = None  # of the draws for requests without a seed; None: from the system
    max_logprobs: int = 20
    tensor_parallel_size: int = 1
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None  # None: yes
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    enforce_eager: bool = False  # operation by operation, with checks for NaN; the same answers
    paces_prompts: bool = False  # somebody waits for each token: prompts are read beside them
    kv_store: str | None = None  # folder of the page store; None: nothing is kept on disk
    kv_store_size: int | None = None  # bytes; None: swap_space, or 4 GiB
    kv_store_salted: bool = False  # prefixes of requests with a cache_salt are stored too
    swap_space: float | None = None  # GiB
    # Of the form of answers, of requests that do not say.
    guided_decoding_disable_any_whitespace: bool = False
    guided_decoding_disable_additional_properties: bool = False
    structured_outputs_config: Mapping[str, Any] | None = None  # the same, as vLLM has them now

    @classmethod
    def from_args(cls, **options: Any) -> EngineConfig:
        """Sorts names of any kind: fields, a peer's inert names, names that must be refused."""
        own = {field.name for field in fields(cls)}
        check_names(options, [*own, *INERT, *ABSENT], "engine options")
        for name, (off, reason) in INERT.items():
            if name in options:
                notice(name, options[name], off, reason)
        for name, (off, reason) in ABSENT.items():
            if name in options and options[name] not in off:
                raise ValueError(f"{name}={options[name]!r} is not supported: {reason}")
        return cls(**_fitted({name: value for name, value in options.items() if name in own}))

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_choices()
        for name, (off, reason) in INERT_FIELDS.items():
            notice(name, getattr(self, name), off, reason)
        if self.kv_store is None:
            notice("swap_space", self.swap_space, (None, 0), "no KV store is there to swap to")

    @property
    def form_defaults(self) -> dict[str, bool]:
        """Fields of `StructuredOutputs` that are on where a request does not say."""
        given = self.structured_outputs_config or {}
        return {
            name: True
            for name in ("disable_any_whitespace", "disable_additional_properties")
            if given.get(name) or getattr(self, f"guided_decoding_{name}")
        }

    @property
    def kv_store_bytes(self) -> int:
        """What the page store may take on disk."""
        if self.kv_store_size is not None:
            return self.kv_store_size
        return int((self.swap_space or 0) * (1 << 30)) or DEFAULT_KV_STORE_BYTES

    @property
    def memory_fraction(self) -> float:
        """Share of the available memory for weights and KV together."""
        return self.gpu_memory_utilization or DEFAULT_MEMORY_FRACTION

    @property
    def kv_format(self) -> str:
        """Of K and V between steps: bf16, fp16 or int8 (codes, a scale per token and head)."""
        return KV_FORMATS[self.kv_cache_dtype]

    @property
    def names(self) -> tuple[str, ...]:
        """What the model answers to in the API; the first one is printed."""
        name = self.served_model_name
        if name is None:
            return (self.model,)
        return (name,) if isinstance(name, str) else tuple(name)

    def _check_sizes(self) -> None:
        if self.max_model_len == -1:  # vLLM's spelling of "as long as fits"
            object.__setattr__(self, "max_model_len", None)
        limits: dict[str, tuple[int, int]] = {
            "max_model_len": (1, 2**31 - 1),
            "max_num_seqs": (1, 4096),
            "max_num_batched_tokens": (1, 65536),
            "kv_cache_memory_bytes": (1, 2**50),
            "kv_store_size": (1, 2**60),
            "num_threads": (1, 1024),
            "max_logprobs": (0, 2**31 - 1),
            "tensor_parallel_size": (1, 2**20),
            "seed": (-(2**63), 2**64 - 1),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None and type(self).__dataclass_fields__[name].default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}: expected an integer, got {value!r}")
            if not low <= value <= high:
                raise ValueError(f"{name}: {value} is outside {low} … {high}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} tokens a step are fewer "
                f"than max_num_seqs ({self.max_num_seqs}), of which each takes one; raise it or "
                f"lower max_num_seqs"
            )
        fraction = self.gpu_memory_utilization
        if fraction is not None and not (_is_number(fraction) and 0 < fraction <= 1):
            raise ValueError(
                f"gpu_memory_utilization: expected a fraction of the available memory "
                f"above 0 and up to 1, got {fraction!r}"
            )

    def _check_form_options(self, given: object) -> None:
        where = "structured_outputs_config"
        if given is None:
            return
        if not isinstance(given, Mapping):
            raise ValueError(f"{where}: expected an object, got {given!r:.80}")
        for name, value in given.items():
            if name not in FORM_OPTIONS:
                raise ValueError(f"{where}: {name!r:.60} is not one of {', '.join(FORM_OPTIONS)}")
            if not any(value is one or (type(value) is str and value == one)
                       for one in FORM_OPTIONS[name]):  # fmt: skip
                known = ", ".join(str(one) for one in FORM_OPTIONS[name] if one not in (None, ""))
                raise ValueError(
                    f"{where}.{name}: {value!r:.60} is not supported"
                    + (f"; known: {known}" if known else "; give it as an option of its own")
                )

    def _check_choices(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model: expected a path or a name, got {self.model!r}")
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ValueError(
                f"generation_config: expected auto, vllm or a path, got {self.generation_config!r}"
            )
        overrides = self.override_generation_config
        if overrides is not None and not isinstance(overrides, Mapping):
            raise ValueError(
                f"override_generation_config: expected an object such as {{'temperature': 0.5}}, "
                f"got {overrides!r:.80}"
            )
        refuse_load_format(self.load_format)
        if self.tokenizer_revision not in (None, "main") and self.tokenizer is None:
            raise ValueError("tokenizer_revision: it is of another tokenizer; name that one too")
        for name in (
            *("tokenizer", "chat_template", "quantization", "kv_store"),
            *("revision", "tokenizer_revision"),
        ):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"{name}: expected a text or None, got {value!r}")
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            # Not `in`, which takes 1 for True.
            if not any(value is one or (isinstance(one, str) and value == one) for one in allowed):
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(str, allowed))}")
        self._check_form_options(self.structured_outputs_config)
        swap = self.swap_space
        if swap is not None and not (_is_number(swap) and 0 <= swap < math.inf):
            raise ValueError(f"swap_space: expected GiB, 0 or more, got {swap!r}")
        self._check_served_names()
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size: {self.tensor_parallel_size} devices asked for, "
                f"found 1 (cpu)"
            )

    def _check_served_names(self) -> None:
        given = self.served_model_name
        names = [given] if isinstance(given, str) else given
        if names is None:
            return
        are_names = isinstance(names, list | tuple) and all(
            isinstance(name, str) and name for name in names
        )
        if not are_names or not names:
            raise ValueError(f"served_model_name: expected a name or several, got {given!r}")


def refuse_load_format(value: Any) -> None:
    """Raises ValueError for one that is not read, with the reason."""
    if value in LOAD_FORMATS:
        return
    known = ", ".join(LOAD_FORMATS)
    reason = NO_LOAD_FORMATS.get(value) if isinstance(value, str) else None
    if reason is None:
        near = difflib.get_close_matches(str(value), [*LOAD_FORMATS, *NO_LOAD_FORMATS], n=1)
        reason = f"is not known{f', nearest: {near[0]}' if near else ''}"
    raise ValueError(f"load_format: {str(value)[:60]!r} {reason} (read: {known})")


def notice(name: str, value: Any, off: tuple[Any, ...], reason: str) -> None:
    """One line for an option that was given and has nothing to do."""
    if value not in off:
        logger.warning(NOTICE, name, value, reason)


def _fitted(options: dict[str, Any]) -> dict[str, Any]:
    """As in vLLM, a smaller token budget lowers the default of max_num_seqs with it."""
    budget = options.get("max_num_batched_tokens")
    if isinstance(budget, int) and 1 <= budget < DEFAULT_NUM_SEQS:
        return {"max_num_seqs": budget, **options}
    return options


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
