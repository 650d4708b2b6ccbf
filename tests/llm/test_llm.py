"""The offline API over a scripted model: what goes in, what comes out, in which order."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
from engine.scripted_runner import HashRunner
from golden.tiny_tokenizer import EOS

from invar.engine.door import Door, ResolvedParams
from invar.llm import LLM, RequestOutputKind, SamplingParams

from .scripted import TOKENIZER, scripted_llm

GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    return scripted_llm(monkeypatch)


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_results_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"{'x' * (i * 7 % 40)}{i}" for i in range(100)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    assert all(output.finished for output in outputs)
    assert texts(outputs) == [texts(llm.generate(prompt, GREEDY))[0] for prompt in prompts]


def test_every_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    ids = TOKENIZER.encode("hello").tolist()
    forms: list[Any] = ["hello", {"prompt": "hello"}, {"prompt_token_ids": ids}, ids, tuple(ids)]
    answers = [texts(llm.generate(form, GREEDY)) for form in forms]
    assert len({tuple(answer) for answer in answers}) == 1
    together = llm.generate(forms, GREEDY)
    assert texts(together) == [answers[0][0]] * 5
    assert together[0].prompt_token_ids == ids
    assert together[2].prompt is None


def test_b31_an_empty_prompt_is_refused_and_nothing_has_run(llm: LLM) -> None:
    bad: list[Any] = ["", [""], [[]], ["good", ""], [{"prompt_token_ids": []}], [None], [5.0]]
    for prompts in bad:
        with pytest.raises(ValueError, match=r"prompts\[\d\]"):
            llm.generate(prompts, GREEDY)
        assert not llm.model.engine.has_unfinished
    assert llm.generate([], GREEDY) == []
    assert len(llm.generate(["good"], GREEDY)[0].outputs[0].token_ids) == 5


def test_b33_a_prompt_over_the_window_names_both_numbers(llm: LLM) -> None:
    prompts: list[Any] = ["a", [1] * 300]
    with pytest.raises(ValueError, match=r"prompts\[1\]: .* 256 tokens. However.* 300 tokens"):
        llm.generate(prompts, GREEDY)


def test_b33_truncation_says_how_many_tokens_it_dropped(llm: LLM) -> None:
    prompts: list[Any] = [[5] * 300, [5] * 3]
    cut, whole = llm.generate(prompts, SamplingParams(max_tokens=1, truncate_prompt_tokens=-1))
    assert (len(cut.prompt_token_ids), cut.num_truncated_tokens) == (255, 45)
    assert (len(whole.prompt_token_ids), whole.num_truncated_tokens) == (3, 0)


@pytest.mark.parametrize(("key", "nearest"), [
    ("promt", "prompt"), ("prompt_tokens_ids", "prompt_token_ids"), ("cache_sal", "cache_salt"),
])  # fmt: skip
def test_unknown_keys_of_a_prompt_name_the_nearest(llm: LLM, key: str, nearest: str) -> None:
    prompts: Any = ["fine", {"prompt": "x", key: "y"}]
    with pytest.raises(ValueError, match=rf"prompts\[1\]: .*{key!r}; did you mean {nearest!r}"):
        llm.generate(prompts, GREEDY)


def test_a_cache_salt_reaches_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    salts: list[str | None] = []
    add = llm.model.engine.add_request
    monkeypatch.setattr(
        llm.model.engine, "add_request", lambda r: (salts.append(r.cache_salt), add(r))
    )
    llm.generate([{"prompt": "a", "cache_salt": "tenant"}, "b"], GREEDY)
    assert salts == ["tenant", None]
    with pytest.raises(ValueError, match=r"prompts\[0\]: cache_salt"):
        llm.generate({"prompt": "a", "cache_salt": 5}, GREEDY)


def test_parameters_that_prompts_share_are_prepared_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[SamplingParams] = []
    prepare = Door.prepare

    def counted(self: Door, params: SamplingParams) -> ResolvedParams:
        prepared.append(params)
        return prepare(self, params)

    monkeypatch.setattr(Door, "prepare", counted)
    other = SamplingParams(temperature=0, max_tokens=3)
    together = llm.generate(["a", "b", "a", "b"], [GREEDY, other, other, GREEDY])
    assert prepared == [GREEDY, other]
    assert [len(one.outputs[0].token_ids) for one in together] == [5, 3, 3, 5]


def test_options_without_effect_get_one_notice(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    neutral = SamplingParams(
        max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY, stream_interval=1,
        skip_reading_prefix_cache=False,
    )  # fmt: skip
    llm.generate("a", neutral)
    assert not caplog.records
    params = SamplingParams(
        max_tokens=1, output_kind=RequestOutputKind.DELTA, stream_interval=4
    )  # fmt: skip
    for _ in range(2):
        llm.generate(["a", "b"], params)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    for name in ("output_kind", "stream_interval"):
        assert sum(name in line for line in said) == 1


def test_a_priority_needs_its_policy(llm: LLM) -> None:
    with pytest.raises(ValueError, match="priority: it needs"):
        llm.generate(["a", "b"], GREEDY, priority=[1, 0])
    assert llm.generate(["a", "b"], GREEDY, priority=[0, 0])
    with pytest.raises(ValueError, match="priority: 0 given for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[])


def test_b25_every_choice_comes_once(llm: LLM) -> None:
    outputs = llm.generate(["a", "b", "c"], SamplingParams(n=3, seed=5, max_tokens=6))
    for output in outputs:
        assert [choice.index for choice in output.outputs] == [0, 1, 2]
        assert [choice.finish_reason for choice in output.outputs] == ["length"] * 3
        assert len({choice.text for choice in output.outputs}) == 3
    assert outputs[0].outputs[0].text != outputs[1].outputs[0].text


def test_b26_choices_repeat_call_to_call(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=5, temperature=1.2, max_tokens=20)
    first, second = (llm.generate("a", params)[0] for _ in range(2))
    assert [c.text for c in first.outputs] == [c.text for c in second.outputs]
    assert len({c.text for c in first.outputs}) == 4


def test_b19_without_a_seed_answers_differ(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20)
    assert len(set(texts(llm.generate(["a"] * 4, params)))) == 4


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(ValueError, match="sampling_params: 3 given for 2 prompts"):
        llm.generate(["a", "b"], params)
    with pytest.raises(ValueError, match="sampling_params: 0 given for 2 prompts"):
        llm.generate(["a", "b"], [])
    wrong: Any = {"temperature": 0}
    with pytest.raises(ValueError, match="sampling_params: expected SamplingParams"):
        llm.generate("a", wrong)


def test_a_stop_string_ends_text_tokens_and_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted_llm(monkeypatch, {"p": "one two END three four"})
    params = SamplingParams(temperature=0, max_tokens=20, stop=["END"], logprobs=0)
    [choice] = llm.generate("p", params)[0].outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one two ", "stop", "END")
    assert len(choice.token_ids) == len("one two END")
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids)
    params.include_stop_str_in_output = True
    assert texts(llm.generate("p", params)) == ["one two END"]
    params.min_tokens = 12
    assert llm.generate("p", params)[0].outputs[0].finish_reason == "length"


def test_stop_tokens_end_the_text_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = scripted_llm(monkeypatch, {"e": [*b"abc", EOS, *b"def"], "n": [*b"abcdefghij"]})
    [ended] = llm.generate("e", SamplingParams(temperature=0))[0].outputs
    assert (ended.text, ended.finish_reason, ended.stop_reason) == ("abc", "stop", None)
    assert ended.token_ids == [*b"abc", EOS]
    ignoring = SamplingParams(temperature=0, ignore_eos=True, max_tokens=7)
    assert texts(llm.generate("e", ignoring)) == ["abcdef"]
    named = SamplingParams(temperature=0, stop_token_ids=[ord("d")])
    [stopped] = llm.generate("n", named)[0].outputs
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("abc", "stop", ord("d"))


def test_logprobs_have_vllms_shape(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    output = llm.generate("hello", params)[0]
    [choice] = output.outputs
    assert choice.logprobs is not None
    for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(position)) == token_id
        assert 2 <= len(position) <= 3
        assert position[token_id].decoded_token == TOKENIZER.token_text(token_id)
    chosen = [p[t].logprob for t, p in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, scores in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert scores is not None
        assert token_id in scores
    plain = llm.generate("hello", GREEDY)[0]
    assert plain.prompt_logprobs is None
    assert plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None


def test_without_detokenizing_there_are_only_tokens(llm: LLM) -> None:
    [choice] = llm.generate("a", SamplingParams(max_tokens=5, detokenize=False))[0].outputs
    assert (choice.text, len(choice.token_ids)) == ("", 5)


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    first = [{"role": "user", "content": "hi"}]
    second = [{"role": "user", "content": "ho"}, {"role": "assistant", "content": "so"}]
    [one] = llm.chat(first, GREEDY)
    both = llm.chat([first, second], GREEDY)
    assert one.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert one.outputs[0].text == both[0].outputs[0].text
    assert len(both) == 2
    [open_ended] = llm.chat(second, GREEDY, continue_final_message=True)
    assert open_ended.prompt is not None
    assert open_ended.prompt.endswith("so")


def test_chat_renders_a_conversation_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = llm.model.chat_template
    assert template is not None
    rendered: list[int] = []
    render = template._render
    monkeypatch.setattr(template, "_render", lambda *a: (rendered.append(1), render(*a))[1])
    llm.chat([[{"role": "user", "content": text}] for text in ("hi", "ho")], GREEDY)
    assert len(rendered) == 2


def test_tools_that_the_template_has_no_place_for_are_told_in_words(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    called = {"function": {"name": "look_up", "arguments": {"at": 1}}}
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "found"},
    ]
    cut = SamplingParams(max_tokens=1, truncate_prompt_tokens=9)
    [answer] = llm.chat(conversation, cut, tools=[tool])
    assert answer.prompt is not None
    asked, used = answer.prompt.index('"name": "look_up", "parameters"'), answer.prompt.rindex("at")
    assert 0 < asked < used < answer.prompt.index("<tool_response>\nfound")


def test_variables_that_the_template_does_not_read_get_a_notice(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        llm.chat(
            [{"role": "user", "content": "hi"}], GREEDY, chat_template_kwargs={"frobnicate": 1}
        )
    (record,) = caplog.records
    assert "chat_template_kwargs.frobnicate" in record.getMessage()


def test_chat_without_a_template_says_what_to_do(llm: LLM) -> None:
    llm.model.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template.*LLM\(chat_template="):
        llm.chat([{"role": "user", "content": "hi"}])


def test_a_request_that_fails_fails_alone(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    runner = llm.model.engine.runner
    assert isinstance(runner, HashRunner)
    runner.not_finite = lambda token: token == ord("~")
    good, bad = llm.generate(["good", "bad~"], GREEDY)
    assert good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].error is not None
    assert "NaN" in bad.outputs[0].error
    assert "request 1 failed" in caplog.text


def test_an_interruption_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = texts(llm.generate("after", GREEDY))
    step, engine = llm.model.engine.step, llm.model.engine
    steps = iter(range(3))

    def interrupted() -> Any:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50))
    monkeypatch.setattr(engine, "step", step)
    assert not engine.has_unfinished
    assert texts(llm.generate("after", GREEDY)) == expected


def test_times_are_in_order(llm: LLM) -> None:
    metrics = llm.generate("a", GREEDY)[0].metrics
    times = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    ]
    assert None not in times
    assert times == sorted(times)  # type: ignore[type-var]


def test_closing_twice_does_nothing(llm: LLM) -> None:
    runner = llm.model.engine.runner
    assert isinstance(runner, HashRunner)
    with llm:
        pass
    llm.close()
    assert runner.closed


def loaded_modules(code: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(run.stdout.split())


def test_imports_are_cheap() -> None:
    assert not {"numpy", "invar.llm"} & loaded_modules("import invar")
    assert not {"numpy", "tokenizers"} & loaded_modules("from invar import SamplingParams")
    heavy = {"fastapi", "uvicorn", "huggingface_hub", "rich", "zmq", "typer", "prometheus_client"}
    assert not heavy & loaded_modules("from invar import LLM, SamplingParams")
    with pytest.raises(ImportError):
        from invar import Nothing  # noqa: F401


@pytest.mark.parametrize("prompts", [None, 5, b"abc", (text for text in "ab"), {"a", "b"}])
def test_what_is_no_prompt_is_a_type_error_naming_what_is(llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match=r"prompts: expected a text, .* got "):
        llm.generate(prompts, GREEDY)
    with pytest.raises(TypeError, match="messages: expected a list of messages"):
        llm.chat(prompts, GREEDY)


def test_a_closed_llm_says_so(llm: LLM) -> None:
    llm.close()
    llm.close()
    for call in (lambda: llm.generate("a"), lambda: llm.generate([]), llm.get_tokenizer):
        with pytest.raises(RuntimeError, match="has been closed"):
            call()


def test_a_second_thread_is_turned_away(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    step = llm.model.engine.step

    def slow() -> Any:
        entered.set()
        assert go_on.wait(10)
        return step()

    monkeypatch.setattr(llm.model.engine, "step", slow)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.extend(llm.generate("hello", GREEDY)))
    thread.start()
    assert entered.wait(10)
    for call in (
        lambda: llm.generate("other", GREEDY),
        lambda: llm.chat([{"role": "user", "content": "x"}], GREEDY),
        llm.close,  # the memory is in use
    ):
        with pytest.raises(RuntimeError, match="another call"):
            call()
    go_on.set()
    thread.join(10)
    assert len(answers[0].outputs[0].token_ids) == 5
    assert len(llm.generate("hello", GREEDY)) == 1


@pytest.mark.parametrize("name", ["self", "tokenizer", "cls"])
def test_template_variables_may_have_any_name(llm: LLM, name: str) -> None:
    conversation = [{"role": "user", "content": "x"}]
    plain = llm.chat(conversation, GREEDY)
    named = llm.chat(conversation, GREEDY, chat_template_kwargs={name: 1})
    assert texts(named) == texts(plain)


def test_what_was_reused_is_reported_and_can_be_forgotten(llm: LLM) -> None:
    def found(**options: Any) -> int:
        params = SamplingParams(max_tokens=3, **options)
        return llm.generate("one two three", params)[0].num_cached_tokens

    tokens = len(llm.model.tokenizer.encode("one two three"))
    llm.reset_prefix_cache()
    assert found(n=3, temperature=1.0) == 0
    assert found() == tokens - 1
    assert found(skip_reading_prefix_cache=True) == 0
    assert llm.reset_prefix_cache()
    assert found() == 0
