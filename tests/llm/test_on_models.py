"""The offline API over real kernels: a tiny model, and the default one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from golden.tiny_models import model_path
from models.memory_source import MemorySource

from invar import LLM, RequestOutput, SamplingParams
from invar.config import EngineConfig
from invar.engine.loader import load_engine

TINY = str(model_path("llama_gqa"))


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM(model=TINY, num_threads=1, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    with LLM(model="smollm2", max_num_seqs=16, max_model_len=1024) as llm:
        yield llm


def bits(output: RequestOutput) -> list[tuple[object, ...]]:
    return [(c.text, c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs]


def test_article_03_two_prompts(smollm2: LLM) -> None:
    prompts = ["The capital of France is", "Explain what a bearing is:"]
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=32)
    outputs = smollm2.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.outputs[0].text


def test_article_19_engine_arguments() -> None:
    llm = LLM(
        model=TINY,
        gpu_memory_utilization=0.9,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        enable_chunked_prefill=True,
    )
    with llm:
        assert llm.generate("hello", SamplingParams(max_tokens=3))[0].finished


def test_the_default_model_answers(smollm2: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    assert " Paris" in smollm2.generate("The capital of France is", greedy)[0].outputs[0].text
    question = [{"role": "user", "content": "What is 2+2?"}]
    [answer] = smollm2.chat(question, SamplingParams(temperature=0, max_tokens=40))[0].outputs
    assert "4" in answer.text
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_b20_results_do_not_depend_on_the_order(tiny: LLM) -> None:
    prompts = [f"{'the water ' * i}{i}" for i in range(6)]
    params = SamplingParams(seed=7, temperature=0.9, max_tokens=12, logprobs=2)
    expected = {output.prompt: bits(output) for output in tiny.generate(prompts, params)}
    for seed in range(3):
        shuffled = prompts[::-1] if not seed else random.Random(seed).sample(prompts, 6)
        for output in tiny.generate(shuffled, params):
            assert bits(output) == expected[output.prompt]


def test_b30_penalties_do_what_they_say(tiny: LLM) -> None:
    def tokens(**penalties: float) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=24, **penalties)  # type: ignore[arg-type]
        return tiny.generate("the there then", params)[0].outputs[0].token_ids

    plain = tokens()
    prompt = set(tiny.get_tokenizer().encode("the there then").tolist())
    assert tokens(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0) == plain
    once = tokens(repetition_penalty=1000.0)
    assert len(set(once)) == len(once)  # nothing twice,
    assert not prompt & set(once)  # and nothing of the prompt
    for name in ("presence_penalty", "frequency_penalty"):
        mild, strong = (tokens(**{name: value}) for value in (0.001, 2.0))
        assert mild[0] == strong[0] == plain[0]  # nothing was generated yet
        assert strong != plain
    assert tokens() == plain  # no state is carried over


def test_b36_the_answer_ends_at_the_window() -> None:
    with LLM(model=TINY, num_threads=1, max_model_len=64) as llm:
        for max_tokens in (100, None):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            [choice] = llm.generate([[5] * 40], params)[0].outputs
            assert (len(choice.token_ids), choice.finish_reason) == (24, "length")


def test_b50_capacity_is_named() -> None:
    """A pool smaller than the context: the length is lowered, or refused where it was asked for."""
    model = load_engine(EngineConfig(model="smollm2", kv_cache_memory_bytes=10 << 20))
    lowered = model.door.max_model_len
    assert lowered < 8192
    assert lowered <= model.engine.kv_capacity_tokens
    with pytest.raises(ValueError, match=f"maximum context length is {lowered} tokens"):
        model.door.resolve("r", [1] * lowered, SamplingParams())
    model.close()
    with pytest.raises(ValueError, match=r"max_model_len: 8192 tokens need .* MiB"):
        load_engine(
            EngineConfig(model="smollm2", kv_cache_memory_bytes=10 << 20, max_model_len=8192)
        )


@pytest.mark.parametrize("chunk", [2048, 48])
def test_b49_prompt_scores_are_those_without_caching(chunk: int) -> None:
    """Of 1, a page, a page and one, three pages of tokens, and prompts that begin alike."""
    whole = random.Random(5).choices(range(256), k=96)
    prompts = [whole[:1], whole[:32], whole[:33], whole, [*whole[:50], 7, 8], [*whole, 9]]
    scored = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)

    def scores(llm: LLM, order: list[list[int]]) -> dict[str, object]:
        outputs = [llm.generate(prompt, scored)[0] for prompt in order]
        for output in outputs:
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
            assert output.prompt_logprobs[0] is None
        return {str(one.prompt_token_ids): (one.prompt_logprobs, bits(one)) for one in outputs}

    options = {"num_threads": 1, "max_num_batched_tokens": chunk, "max_num_seqs": 8}
    with LLM(model=TINY, enable_prefix_caching=False, **options) as llm:
        cold = scores(llm, prompts)
    for order in (prompts, prompts[::-1]):
        with LLM(model=TINY, **options) as llm:
            assert scores(llm, order) == cold
            reused = llm.generate(whole, SamplingParams(max_tokens=1))[0].num_cached_tokens
            assert reused == 95
            assert scores(llm, order) == cold


def test_b58_the_longest_context_is_the_files_and_an_answer_ends_there(tmp_path: Path) -> None:
    """A factor of 4 has made 2,048 tokens of 512 already."""
    source = MemorySource.read(model_path("llama_gqa"))
    source.metadata |= {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 512,
    }
    scaled = str(source.write(tmp_path / "scaled.gguf"))
    with pytest.raises(ValueError, match="max_model_len: 2049 is beyond the 2048 tokens"):
        LLM(model=scaled, max_model_len=2049)
    greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
    with LLM(model=scaled, num_threads=1) as llm:
        [output] = llm.generate([[5] * 2040], greedy)
        [choice] = output.outputs
        assert (len(choice.token_ids), choice.finish_reason) == (8, "length")
        with pytest.raises(ValueError, match="maximum context length is 2048 tokens"):
            llm.generate([[5] * 2048], greedy)


def test_what_cannot_be_is_refused_at_the_start() -> None:
    for options, message in (
        ({"max_model_len": 10**6}, "beyond the 2048 tokens"),
        ({"quantization": "awq"}, "has plain weights, and awq has to be calibrated .* int8, fp8"),
        ({"max_logprobs": 1000}, "max_logprobs"),
        ({"kv_cache_memory_bytes": 1000}, "KV budget"),
        ({"tensor_parallel_size": 2}, "found 1"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(model=TINY, **options)


def test_a_template_of_the_callers_own(tmp_path: object) -> None:
    template = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    with LLM(model=TINY, chat_template=template) as llm:
        [output] = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1))
        assert output.prompt == "hi!"


def test_hundreds_of_prompts_of_any_length(tiny: LLM) -> None:
    dice = random.Random(3)
    prompts = [[dice.randrange(256) for _ in range(dice.randrange(1, 200))] for _ in range(300)]
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = tiny.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for index in (0, 150, 299):
        [one] = tiny.generate(prompts[index], params)
        assert bits(one) == bits(outputs[index])


def test_b92_a_library_installs_no_handlers_and_ends_twice() -> None:
    import gc
    import signal
    import threading

    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before, threads = handlers(), threading.active_count()
    llm = LLM(model=TINY, num_threads=1, max_num_seqs=2)
    llm.generate("a", SamplingParams(max_tokens=2))
    assert handlers() == before
    llm.close()
    llm.close()
    del llm
    gc.collect()
    assert handlers() == before
    assert threading.active_count() <= threads
