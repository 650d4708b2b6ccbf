"""What a template writes into a history is read back by the format that was found for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from text.llama_cpp_vectors import data_folder

from invar.text.chat_template import ChatTemplate, ChatTemplateError
from invar.text.reply import ReplyFormat, ReplyMessage
from invar.text.reply_detection import detected, read, reasoning_markers, whole_form
from invar.text.tool_prompt import ToolPrompt

NOW = datetime(2026, 1, 2)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "the city"},
        "days": {"type": "integer", "description": "how many"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
QUESTION = {"role": "user", "content": "Weather?"}
PARIS, ROME = {"city": "Paris", "days": 3}, {"city": 'Ro"me {}', "days": 1}
CONTENT, THOUGHT = "Sunny.", "I wonder."
TURNS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "content": (CONTENT, "", []),
    "thought": (CONTENT, THOUGHT, []),
    "call": ("", "", [PARIS]),
    "content, call": (CONTENT, "", [PARIS]),
    "two calls": ("", "", [PARIS, ROME]),
    "thought, call": ("", THOUGHT, [PARIS]),
    "all": (CONTENT, THOUGHT, [PARIS]),
}
# What ends a turn, where no later turn shows it: tokens of the model's own that stop it.
ENDS = re.compile(
    r"<\|(eot_id|eom_id|end_of_text|im_end|return|call|calls|eot|role_end|user_end"
    r"|assistant_end|END_OF_TURN_TOKEN|START_OF_TURN_TOKEN|end_of_msg|endoftext)\|>|</s>|\[e~\["
    r"|<end_of_turn>|<turn\|>|<[^<>]*(eos|end▁of▁sentence)[^<>]*>|</assistant>|<sep>|\n\n\Z"
    r"|<SPECIAL_12>|<end_of_sentence>|<\|message_sep\|>\s*\Z|<\|observation\|>|<end_of_utterance>|<\|tool_response>|<start_function_response>"
)
END_OF_PART = "<|end|>"  # ends the turn of all models but those with channels

# What a template writes as something else, or cannot write.
CHANGED: dict[tuple[str, str], str] = {
    **{
        (name, turn): "content beside a call is written as a thought, or refused beside one"
        for name in ("openai-gpt-oss-120b", "llm-jp-llm-jp-4.1-8b-thinking")
        for turn in ("content, call", "all")
    },
    **{
        (f"meta-llama-Llama-{name}-Instruct", "two calls"): "refused: one call a turn"
        for name in ("3.1-8B", "3.2-3B", "3.3-70B")
    },
}  # fmt: skip
ALL = sorted(path.stem for path in (data_folder() / "templates").glob("*.jinja"))


@dataclass(frozen=True)
class Model:
    template: ChatTemplate
    prompt: ToolPrompt
    tool_parser: str | None
    form: ReplyFormat

    @classmethod
    def of(cls, source: str) -> Model:
        template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
        prompt, found = ToolPrompt(template), detected(template, ())
        name = found or "hermes"
        return cls(template, prompt, found, whole_form(
            name, reasoning_markers(template, (), None, name), prompt))  # fmt: skip

    def render(self, messages: list[dict[str, Any]], generate: bool = False) -> str:
        told, tools = self.prompt.fitted(messages, TOOLS)
        return self.template.render(told, tools=tools, add_generation_prompt=generate, now=NOW)

    def turns(self, message: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """The turn as the template writes it, each with a prompt that it may stand behind.

        A prompt that opens more than the turn has (thoughts) stands before it all the same.
        """
        whole = self.render([QUESTION, message])
        other = self.render([QUESTION, {"role": "assistant", "content": "Another."}])
        for prompt in (self.render([QUESTION], True), self.render([QUESTION]), other):
            common = 0
            while common < min(len(prompt), len(whole)) and prompt[common] == whole[common]:
                common += 1
            if common < len(prompt) and (
                inside := re.search(r"[<\[][^<>\[\]\n]*$", whole[:common])
            ):
                common = inside.start()  # no marker is cut
            text = whole[common:]
            if end := ENDS.search(text):
                text = text[: end.start()]
            if self.tool_parser != "openai":
                text = text.split(END_OF_PART)[0]
            yield prompt[:common], text
            if prompt.startswith(whole[:common]):
                yield prompt, text


@pytest.fixture(scope="module")
def models(llama_cpp_data: Path) -> dict[str, Model]:
    folder = llama_cpp_data / "templates"
    return {name: Model.of((folder / f"{name}.jinja").read_text("utf-8")) for name in ALL}


def said(message: ReplyMessage) -> tuple[str, str, list[dict[str, Any]]]:
    calls = [json.loads(call.arguments) for call in message.calls]
    assert {call.name for call in message.calls} <= {"get_weather"}
    return message.content.strip(), message.reasoning.strip(), calls


@pytest.mark.parametrize("name", ALL)
def test_a_turn_comes_back_in_every_chunking(models: dict[str, Model], name: str) -> None:
    model, tools = models[name], {"get_weather": PARAMETERS}
    for turn, (content, thought, calls) in TURNS.items():
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [
                {"id": f"call0000{index}", "type": "function",
                 "function": {"name": "get_weather", "arguments": json.dumps(one)}}
                for index, one in enumerate(calls)
            ]  # fmt: skip
        found = []
        try:
            for prompt, text in model.turns(message):
                # A template may leave out thoughts, or what is said beside a call.
                expected = (
                    content if content in text else "",
                    thought if thought in text else "",
                    [one for one in calls if one["city"][:2] in text],
                )
                whole = read(model.form, text, tools, prompt)
                found.append(said(whole) == expected and bool(text.strip()))
                for size in (1, 3, 7):
                    assert read(model.form, text, tools, prompt, size) == whole, (turn, size)
        except ChatTemplateError:
            found = []
        assert any(found) == ((name, turn) not in CHANGED), (turn, text)


def test_the_format_of_every_template_is_known(models: dict[str, Model]) -> None:
    """Without one: those that write no calls, and are told of tools in words."""
    unknown = {name for name, model in models.items() if model.tool_parser is None}
    assert all(not models[name].prompt.shows_calls for name in unknown), unknown
    for name, parser in (
        ("CohereForAI-c4ai-command-r-plus-tool_use", "command_r_plus"),
        ("MiniMax-M3", "minimax_m3"),
        ("muse-glimmer", "muse_glimmer"),
        ("fireworks-ai-llama-3-firefunction-v2", "firefunction"),
        ("upstage-Solar-Open-100B", "solar_open"),
    ):
        assert models[name].tool_parser == parser
