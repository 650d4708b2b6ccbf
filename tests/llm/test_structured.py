"""Structured output of `LLM`, over a tiny model with the real kernels."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from articles.model import TINY

from invar import LLM, SamplingParams, StructuredOutputs


@dataclasses.dataclass
class Skill:
    name: str
    level: int


SHAPE = {"name": str, "age": int, "skills": [Skill], "kind": ("a", "b")}
PROMPTS = ["Hello", "A person as JSON:", "x"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY, max_num_seqs=8) as llm:
        yield llm


def params(form: object, max_tokens: int = 120, **options: object) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=7, max_tokens=max_tokens, structured_outputs=form, **options
    )  # type: ignore[arg-type]


def test_objects_of_plain_types(llm: LLM) -> None:
    for answer in llm.generate(PROMPTS, params(SHAPE), use_tqdm=False):
        (one,) = answer.outputs
        value = json.loads(one.text)
        assert list(value) == ["name", "age", "skills", "kind"]
        assert isinstance(value["age"], int)
        assert all(set(skill) == {"name", "level"} for skill in value["skills"])
        assert one.finish_reason in ("stop", "length")


def test_texts_of_other_forms(llm: LLM) -> None:
    date, choice, tagged = (
        llm.generate("x", params(form), use_tqdm=False)[0].outputs[0]
        for form in (
            {"regex": r"[0-9]{4}-[0-9]{2}"},
            {"choice": ["left", "right"]},
            {"structural_tag": {"type": "structural_tag", "format": {
                "type": "tag", "begin": "<n>", "end": "</n>",
                "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}}}}},
        )
    )  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d{2}", date.text)
    assert choice.text in ("left", "right")
    assert tagged.text in ("<n>1</n>", "<n>2</n>")
    assert (date.finish_reason, choice.finish_reason) == ("stop", "stop")


def test_the_same_bits_drawn_or_forced_alone_or_together(llm: LLM) -> None:
    form = StructuredOutputs.of(SHAPE)
    together = llm.generate(PROMPTS, params(form, logprobs=2), use_tqdm=False)
    guidance = llm.model.engine.guidance
    guidance._jumps = False
    try:
        for prompt, expected in zip(PROMPTS, together, strict=True):
            llm.reset_prefix_cache()
            alone = llm.generate(prompt, params(form, logprobs=2), use_tqdm=False)[0]
            assert alone.outputs == expected.outputs
    finally:
        guidance._jumps = True


def test_too_few_tokens_name_the_least(llm: LLM) -> None:
    with pytest.raises(ValueError, match="max_tokens: 5 tokens hold no answer") as refusal:
        llm.generate("x", params(SHAPE, 5), use_tqdm=False)
    least = int(re.findall(r"has (\d+)$", str(refusal.value))[0])
    (one,) = llm.generate("x", params(SHAPE, least), use_tqdm=False)[0].outputs
    assert list(json.loads(one.text)) == ["name", "age", "skills", "kind"]
    assert len(one.token_ids) <= least
    assert one.finish_reason == "length"


def test_bad_constraints_say_why(llm: LLM) -> None:
    for form, why in (
        ({"regex": "(a+"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        (StructuredOutputs(json={"type": "strng"}), "Invalid type: strng"),
        (StructuredOutputs(json={"$ref": "#/$defs/x"}), "does not exist"),
        (StructuredOutputs(json={"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (StructuredOutputs(json={"not": {"type": "null"}}, strict=True), '"not"'),
        ({"grammar": "start: missing"}, "missing"),
    ):
        with pytest.raises(ValueError, match=r"prompts\[0\]: structured_outputs: ") as refusal:
            llm.generate("x", params(form), use_tqdm=False)
        assert why in str(refusal.value)
        assert len(str(refusal.value)) < 600


def test_ignored_keywords_are_told(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "integer", "not": {"const": 3}, "minimum": 1, "maximum": 9}
    (one,) = llm.generate("x", params(schema), use_tqdm=False)[0].outputs
    assert one.text in "123456789"
    assert '"not"' in caplog.text


THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think></think>{% endif %}"
)


def test_a_form_and_a_budget_of_thoughts(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(THINKS)
    chat = [{"role": "user", "content": "x"}]
    with LLM(TINY, max_num_seqs=4, chat_template=str(template)) as llm:
        (one,) = llm.chat(chat, params({"regex": "[a-c]{4}"}), use_tqdm=False)
        assert re.fullmatch(r".*</think>\n{0,2}[a-c]{4}", one.outputs[0].text, re.DOTALL)
        for options in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
            (off,) = llm.chat(chat, params({"regex": "[a-c]{4}"}), use_tqdm=False,
                              chat_template_kwargs=options)  # fmt: skip
            assert re.fullmatch(r"(</think>\n{0,2})?[a-c]{4}", off.outputs[0].text)
        budget = SamplingParams(
            temperature=1.0, seed=7, max_tokens=40, ignore_eos=True, thinking_token_budget=5
        )
        (bounded,) = llm.chat(chat, budget, use_tqdm=False)
        end = llm.get_tokenizer().encode_inside("</think>", parse_special=True)
        assert bounded.outputs[0].token_ids[5 : 5 + len(end)] == end
        (text,) = llm.generate("user: x\nassistant:<think>\n", budget, use_tqdm=False)
        assert "</think>" in text.outputs[0].text
        (again,) = llm.generate(
            "user: x\nassistant:<think>\n", dataclasses.replace(budget, thinking_token_budget=None),
            use_tqdm=False)  # fmt: skip
        assert "</think>" not in again.outputs[0].text
    for wrong in (-2, "5", True):
        with pytest.raises(ValueError, match="thinking_token_budget"):
            SamplingParams(thinking_token_budget=wrong)  # type: ignore[arg-type]


COMPACT: list[dict[str, object]] = [
    {"guided_decoding_disable_any_whitespace": True},
    {"structured_outputs_config": {"disable_any_whitespace": True, "backend": "xgrammar"}},
]


@pytest.mark.parametrize("options", COMPACT, ids=lambda one: next(iter(one)))
def test_no_blanks_where_the_engine_says_so(options: dict[str, object]) -> None:
    with LLM(TINY, max_num_seqs=4, **options) as llm:
        door = llm.model.door
        form = StructuredOutputs(json={"type": "array", "items": {"enum": [1]}, "minItems": 3})
        assert door.normalised(form) == StructuredOutputs(
            json=form.json, disable_any_whitespace=True
        ).normalised(leading_space=door.leading_space)
        (answer,) = llm.generate("x", params(form, 60), use_tqdm=False)
        assert re.fullmatch(r" ?\[1(,1)+\]", answer.outputs[0].text)
        # A pattern of the request's own goes before.
        own = StructuredOutputs(json=form.json, whitespace_pattern="  ")
        assert door.normalised(own) == own.normalised(leading_space=door.leading_space)


@pytest.mark.parametrize(("given", "said"), [
    ({"whitespace": True}, "'whitespace' is not one of"),
    ({"disable_any_whitespace": 1}, "disable_any_whitespace: 1 is not supported"),
    ({"enable_in_reasoning": True}, "enable_in_reasoning: True is not supported"),
    ("x", "expected an object"),
])  # fmt: skip
def test_wrong_options_of_forms(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"structured_outputs_config.*{said}"):
        LLM(TINY, structured_outputs_config=given)


def test_a_form_is_normalised_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    count, honest = [0], StructuredOutputs.normalised

    def counted(form: StructuredOutputs, **options: bool) -> str:
        count[0] += 1
        return honest(form, **options)

    monkeypatch.setattr(StructuredOutputs, "normalised", counted)
    llm.generate(PROMPTS, params({"choice": ["a", "b"]}), use_tqdm=False)
    assert count == [1]
