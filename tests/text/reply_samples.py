"""Replies as models write them, with what they say: one of each format at least, and bad ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from invar.text.model_formats import CALL_FORMATS, REASONING, WHOLE_FORMATS
from invar.text.reply import MarkedFormat, ReplyFormat

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "near": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "exact": {"type": "boolean"},
        "opt": {"type": "object"},
    },
}
TOOLS = {"weather": SCHEMA, "now": {}, "all_of": SCHEMA}


@dataclass(frozen=True)
class Sample:
    name: str
    form: ReplyFormat
    text: str
    calls: tuple[tuple[str, str], ...]  # name, arguments to the letter
    content: str = ""
    reasoning: str = ""
    prompt_end: str = ""
    complete: bool = True


def form_of(name: str, reasoning: str | None = "think") -> ReplyFormat:
    if name in WHOLE_FORMATS:
        return WHOLE_FORMATS[name]
    return MarkedFormat(None if reasoning is None else REASONING[reasoning], CALL_FORMATS[name])


# Braces, quotes, escapes, markers and emoji inside of strings.
TRICKY = '{"city": "a}b{ \\"c\\" </tool_call> [/] \\\\ 😀\\u00e9", "near": ["]", "}"], "days": 3}'
PARIS = '{"city": "Paris", "days": 3}'
ROME = '{"city": "Rome"}'
TWO = (("weather", PARIS), ("weather", ROME))
TAGGED = '{"city": "P<b>a</b> \\"r\\"\\n😀", "days": 3, "near": ["x"], "exact": true}'


def tagged(open_: str, middle: str, close: str, joint: str = "") -> str:
    values = (("city", 'P<b>a</b> "r"\n😀'), ("days", "3"), ("near", '["x"]'), ("exact", "true"))
    return joint.join(f"{open_}{key}{middle}{value}{close}" for key, value in values)


def function_tags(section: str, line: str) -> str:
    arguments = tagged("<parameter=", f">{line}", f"{line}</parameter>", "\n")
    return f"<{section}>\n<function=weather>\n{arguments}\n</function>\n</{section}>"


def invoke(prefix: str, section: str, kind: str = "") -> str:
    parts = [
        f'<{prefix}parameter name="{key}"{flag}>{value}</{prefix}parameter>'
        for key, value, flag in (
            ("city", 'P<b>a</b> "r"\n😀', kind and f' {kind}="true"'),
            ("days", "3", kind and f' {kind}="false"'),
            ("near", '["x"]', kind and f' {kind}="false"'),
            ("exact", "true", kind and f' {kind}="false"'),
        )
    ]
    inner = "\n".join(parts)
    return (
        f'<{prefix}{section}>\n<{prefix}invoke name="weather">\n{inner}\n</{prefix}invoke>\n'
        f'<{prefix}invoke name="now">\n</{prefix}invoke>\n</{prefix}{section}>'
    )


def elements(*members: tuple[str, Any]) -> str:
    mark = "]<]minimax[>["

    def inside(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(element(key, one) for key, one in value.items())
        if isinstance(value, list):
            return "".join(element("item", one) for one in value)
        return str(value)

    def element(name: str, value: Any) -> str:
        return f"{mark}<{name}>{inside(value)}{mark}</{name}>"

    arguments = "".join(element(name, value) for name, value in members)
    call = f'{mark}<invoke name="weather">{arguments}{mark}</invoke>\n'
    return f"{mark}<tool_call>\n{call}{mark}</tool_call>"


def sample(name: str, text: str, calls: Any, content: str = "", **more: Any) -> Sample:
    form = form_of(more.pop("form", name), more.pop("thinks", "think"))
    return Sample(f"{name}-{len(text)}", form, text, tuple(calls), content, **more)


def hermes(arguments: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deepseek(arguments: str, fence: bool) -> str:
    head = "function<｜tool▁sep｜>weather\n```json\n" if fence else "weather<｜tool▁sep｜>"
    end = "\n```" if fence else ""
    return f"<｜tool▁call▁begin｜>{head}{arguments}{end}<｜tool▁call▁end｜>"


def section(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


def kimi(arguments: str, index: int) -> str:
    return (
        f"<|tool_call_begin|>functions.weather:{index}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
    )


def keyed(open_: str, sep: str, end: str, line: str) -> str:
    arguments = line.join(
        f"<arg_key{end}>{key}</arg_key{end}>{line}<arg_value{end}>{value}</arg_value{end}>"
        for key, value in (
            ("city", 'P<b>a</b> "r"\n😀'), ("days", "3"), ("near", '["x"]'), ("exact", "true")
        )
    )  # fmt: skip
    return f"{open_}weather{sep}{arguments}{line}</tool_call{end}>"


def kimi_k3() -> str:
    def argument(key: str, kind: str, value: str) -> str:
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'

    arguments = argument("city", "string", "Paris") + argument("days", "number", "3")
    return (
        "Thought<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>"
        f'<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>{arguments}'
        '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>"
    )


def both(first: str, second: str, joint: str = "") -> str:
    return first + joint + second


JSON_LIST = (
    f'[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "weather", "arguments": {ROME}}}]'
)
SAMPLES = [
    # ---------------------------------------------------------------- words, thoughts and calls
    sample("hermes", "Just words,  \n with blanks \n", (), "Just words,  \n with blanks \n"),
    sample("hermes", hermes(PARIS), TWO[:1]),
    sample("hermes", f"Let me look.\n{hermes(PARIS)}\n{hermes(ROME)}", TWO, "Let me look."),
    sample("hermes", hermes(TRICKY), (("weather", TRICKY),)),
    sample(
        "hermes", f"<think>\nHm, so.\n</think>\n\n{hermes(PARIS)}", TWO[:1], "", reasoning="Hm, so."
    ),
    sample(
        "hermes", "Hm <b>.\n</think>\n\nYes", (), "Yes", reasoning="Hm <b>.", prompt_end="<think>\n"
    ),
    sample("hermes", "Yes", (), "Yes", prompt_end="<think>\n\n</think>\n\n"),
    sample(
        "hermes",
        f"Hm. {hermes(ROME)}</think> Ok",
        TWO[1:],
        "Ok",
        reasoning="Hm.",
        prompt_end="<think>\n",
    ),
    sample("hermes", "only thoughts", (), "", reasoning="only thoughts", prompt_end="<think>"),
    sample("hermes", '<tool_call>{"arguments": {}, "name": "now"}</tool_call>', (("now", "{}"),)),
    sample("hermes", '<tool_call>{"name": "now"}</tool_call>', (("now", "{}"),)),
    sample("hermes", f"<tool_call>{JSON_LIST}</tool_call>", TWO),
    sample("hermes", "<tool_call>[]</tool_call>Nothing to call.", (), "Nothing to call."),
    sample(
        "lfm2", "<|tool_call_start|>[]<|tool_call_end|>Nothing to call.", (), "Nothing to call."
    ),
    sample(
        "hermes",
        f'<tool_call>{{"id": "1", "name": "weather", "parameters": {PARIS}, "type": "x"}}}}</tool_call>',
        TWO[:1],
    ),
    sample(
        "hermes",
        f"<tool_call>{json.dumps({'name': 'weather', 'arguments': PARIS})}</tool_call>",
        TWO[:1],
    ),
    # ------------------------------------------------------------------------------ broken ones
    sample("hermes", "a <tool_call> b", (), "a <tool_call> b"),
    sample("hermes", "<tool_call>\nnot json</tool_call>", (), "<tool_call>\nnot json</tool_call>"),
    sample("hermes", "<tool_call><tool_call>" + hermes(PARIS), TWO[:1], "<tool_call><tool_call>"),
    sample("hermes", '<tool_call>{"name": "weat', (), '<tool_call>{"name": "weat'),
    sample(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Par',
        (("weather", '{"city": "Par'),),
        complete=False,
    ),
    sample(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {\'city\': bad, x}}</tool_call> and on',
        (("weather", "{'city': bad, x}"),),
        "and on",
    ),
    sample(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"a": 1 </tool_call> and on',
        (("weather", '{"a": 1 '),),
        "and on",
        complete=False,
    ),
    sample("hermes", "<tool_call>" + '{"name": ' * 3000, (), "<tool_call>" + '{"name": ' * 3000),
    sample("hermes", "<tool_call>" + " " * 40_000, (), "<tool_call>" + " " * 40_000),
    sample(
        "hermes", "<<<tool_call<tool_call></tool_call", (), "<<<tool_call<tool_call></tool_call"
    ),
    # --------------------------------------------------------------------------------- families
    sample("llama3_json", f'{{"name": "weather", "parameters": {PARIS}}}', TWO[:1]),
    sample(
        "llama3_json",
        f'{{"type": "function", "name": "weather", "parameters": {PARIS}}}; '
        f'{{"name": "weather", "parameters": {ROME}}}',
        TWO,
    ),
    sample("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}', TWO[:1]),
    sample("llama3_json", '{"name": "John", "age": 3}', (), '{"name": "John", "age": 3}'),
    sample("llama3_json", ' {"answer": [1, 2]} ok', (), ' {"answer": [1, 2]} ok'),
    sample("llama4_pythonic", "[weather(city='Paris', days=3), weather(city=\"Rome\")]", TWO),
    sample(
        "llama4_pythonic",
        '<|python_start|>[weather(opt={"a": [true, None]}, exact=False)]<|python_end|>',
        (("weather", '{"opt": {"a": [true, null]}, "exact": false}'),),
    ),
    sample("llama4_pythonic", "[1, 2] and [weather]", (), "[1, 2] and [weather]"),
    sample("llama4_pythonic", "[weather(city=f(x), days)]", (("weather", "(city=f(x), days)"),)),
    sample(
        "lfm2",
        "<|tool_call_start|>[weather(city='a)b\\'c', days=-3), now()]<|tool_call_end|>Ok",
        (("weather", '{"city": "a)b\'c", "days": -3}'), ("now", "{}")),
        "Ok",
    ),
    sample("mistral", f"[TOOL_CALLS]{JSON_LIST}", TWO),
    sample(
        "mistral",
        f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{PARIS}[TOOL_CALLS]weather[ARGS]{ROME}",
        TWO,
    ),
    sample(
        "mistral",
        f"[THINK]Hm[/THINK]Hi[TOOL_CALLS]weather[ARGS]{TRICKY}",
        (("weather", TRICKY),),
        "Hi",
        reasoning="Hm",
        thinks="magistral",
    ),
    sample("deepseek_v3", section(deepseek(PARIS, True), "\n", deepseek(ROME, True)), TWO),
    sample("deepseek_v3", "Hi\n\n" + section(deepseek(TRICKY, True)), (("weather", TRICKY),), "Hi"),
    sample(
        "deepseek_v31", section(deepseek(PARIS, False), deepseek(ROME, False)) + "Done", TWO, "Done"
    ),
    sample(
        "deepseek_v32",
        invoke("｜DSML｜", "function_calls", "string"),
        (("weather", TAGGED), ("now", "{}")),
    ),
    sample(
        "deepseek_v4",
        invoke("｜DSML｜", "tool_calls", "string"),
        (("weather", TAGGED), ("now", "{}")),
    ),
    sample("qwen3_xml", function_tags("tool_call", "\n") * 2, (("weather", TAGGED),) * 2),
    sample("qwen3_xml", "So.\n<function=now>\n</function>", (("now", "{}"),), "So."),
    sample(
        "qwen3_xml",
        "<tool_call>\n<function=weather>\n<parameter=city>\nPar",
        (("weather", '{"city": "Par'),),
        complete=False,
    ),
    sample(
        "seed_oss", function_tags("seed:tool_call", ""), (("weather", TAGGED),), thinks="seed_oss"
    ),
    sample(
        "seed_oss",
        "<seed:tool_call><function=weather><parameter=opt>{'a': True}</parameter></function></seed:tool_call>",
        (("weather", '{"opt": {"a": true}}'),),
        thinks="seed_oss",
    ),
    sample("glm45", keyed("<tool_call>", "\n", "", "\n"), (("weather", TAGGED),)),
    sample(
        "glm45",
        keyed("<tool_call>", "", "", "") + "<tool_call>now</tool_call>",
        (("weather", TAGGED), ("now", "{}")),
    ),
    sample(
        "hy3",
        "<tool_calls:opensource>\n"
        + keyed("<tool_call:opensource>", "<tool_sep:opensource>\n", ":opensource", "\n")
        + "\n</tool_calls:opensource>",
        (("weather", TAGGED),),
        thinks="hy3",
    ),
    sample("granite", f"<|tool_call|>{JSON_LIST}", TWO),
    sample("granite", f"<tool_call>{JSON_LIST}", TWO),
    sample(
        "granite-20b-fc", f'<function_call> {{"name": "weather", "arguments": {PARIS}}}', TWO[:1]
    ),
    sample("phi4_mini_json", f"<|tool_call|>{JSON_LIST}<|/tool_call|>", TWO),
    sample("phi4_mini_json", f"functools{JSON_LIST}", TWO),
    sample("firefunction", f" functools{JSON_LIST}", TWO),
    sample(
        "kimi_k2",
        f"<|tool_calls_section_begin|>{kimi(PARIS, 4)}{kimi(ROME, 5)}<|tool_calls_section_end|>",
        TWO,
    ),
    sample(
        "kimi_k3",
        kimi_k3(),
        (("weather", PARIS), ("now", "{}")),
        "Hi",
        reasoning="Thought",
        prompt_end="<|open|>think<|sep|>",
        thinks="kimi_k3",
    ),
    sample(
        "minimax_m2",
        invoke("", "x")
        .replace("<x>", "<minimax:tool_call>")
        .replace("</x>", "</minimax:tool_call>"),
        (("weather", TAGGED), ("now", "{}")),
    ),
    sample(
        "minimax_m3",
        elements(
            ("city", 'P<b>a</b> "r"'),
            ("days", "3"),
            ("exact", "true"),
            ("near", ["x", "y"]),
            ("opt", {"a": "1", "b": ["2"]}),
        ),
        (
            (
                "weather",
                '{"city": "P<b>a</b> \\"r\\"", "days": 3, "exact": true, '
                '"near": ["x", "y"], "opt": {"a": 1, "b": [2]}}',
            ),
        ),
        thinks="minimax_m3",
    ),
    sample(
        "minimax_m3",
        f"</mm:think>Hi{elements()}",
        (("weather", "{}"),),
        "Hi",
        thinks="minimax_m3",
    ),
    sample(
        "muse_glimmer",
        " to=self<|message|>Hm<|eom|><|start|>assistant to=weather<|message|>"
        + invoke("atem:", "function_calls").replace("</atem:function_calls>", "")
        + "</atem:function_calls><|eom|><|start|>assistant to=user<|message|>Done <i>.",
        (("weather", TAGGED), ("now", "{}")),
        "Done <i>.",
        reasoning="Hm",
        prompt_end="<|start|>assistant",
    ),
    sample(
        "muse_glimmer", " to=user<|message|>Hi<|eot|>", (), "Hi", prompt_end="<|start|>assistant"
    ),
    sample(
        "minicpm5",
        '<function name="weather"><param name="city"><![CDATA[a</param>b]]></param>'
        '<param name="days">3</param></function>',
        (("weather", '{"city": "a</param>b", "days": 3}'),),
    ),
    sample(
        "cohere",
        '<|START_THINKING|>Hm<|END_THINKING|><|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": '
        f'"weather", "parameters": {PARIS}}}\n]<|END_ACTION|>',
        TWO[:1],
        reasoning="Hm",
        thinks="cohere",
    ),
    sample("cohere", "<|START_RESPONSE|>Hi <b><|END_RESPONSE|>", (), "Hi <b>", thinks="cohere"),
    sample(
        "command_r_plus",
        f'Action: ```json\n[{{"tool_name": "weather", "parameters": {PARIS}}}]```',
        TWO[:1],
    ),
    sample(
        "functionary_v31",
        f"<function=weather>{PARIS}</function><function=weather>{ROME}</function>",
        TWO,
    ),
    sample(
        "functionary_v32",
        f"all\nHi\n>>>weather\n{PARIS}>>>weather\n{ROME}",
        TWO,
        "Hi",
        prompt_end="\n\n>>>",
    ),
    sample("functionary_v32", "all\nHi > >> there", (), "Hi > >> there", prompt_end=">>>"),
    sample(
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>a{b}:c"<|"|>,days:3,opt:{x:true,y:None}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        (("weather", '{"city":"a{b}:c\\"","days":3,"opt":{"x":true,"y":null}}'), ("now", "{}")),
        thinks="gemma4",
    ),
    sample(
        "gemma4", "<|channel>thought\nHm\n<channel|>Hi", (), "Hi", reasoning="Hm", thinks="gemma4"
    ),
    sample(
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>",
        (("weather", '{"city":"Paris"}'),),
    ),
    sample("nemotron", f"<TOOLCALL>{JSON_LIST}</TOOLCALL>", TWO),
    sample("minimax", f"<tool_calls>{JSON_LIST}</tool_calls>", TWO),
    sample(
        "apriel",
        f"Hm.\n[BEGIN FINAL RESPONSE]\nHi\n<tool_calls>{JSON_LIST}</tool_calls>\n[END FINAL RESPONSE]",
        TWO,
        "Hi",
        reasoning="Hm.",
        form="minimax",
        thinks="apriel",
        prompt_end="Here are my reasoning steps:\n",
    ),
    sample(
        "apertus",
        f'<|tools_prefix|>[{{"weather": {PARIS}}}, {{"now": {{}}}}]<|tools_suffix|>',
        (("weather", PARIS), ("now", "{}")),
    ),
    sample("gigachat3", f'<|function_call|>{{"name": "weather", "arguments": {PARIS}}}', TWO[:1]),
    sample(
        "olmo3",
        "<function_calls>weather(city='Paris', days=3)\nweather(city='Rome')</function_calls>",
        TWO,
    ),
    sample("longcat", hermes(PARIS).replace("tool_call", "longcat_tool_call"), TWO[:1]),
    sample(
        "internlm",
        f'<|action_start|><|plugin|>{{"name": "weather", "parameters": {PARIS}}}<|action_end|>',
        TWO[:1],
    ),
    sample(
        "solar_open",
        f"<|tool_calls|><|tool_call:begin|>c1<|tool_call:name|>weather<|tool_call:args|>{PARIS}<|tool_call:end|>"
        "<|calls|>",
        TWO[:1],
    ),
    # ---------------------------------------------------------------------------------- harmony
    sample(
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi <b>",
        (),
        "Hi <b>",
        reasoning="Hm.",
        prompt_end="<|start|>assistant",
    ),
    sample(
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{TRICKY}<|call|>",
        (("weather", TRICKY),),
        reasoning="Hm.",
        prompt_end="<|start|>assistant",
    ),
    sample(
        "openai",
        f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}",
        TWO[:1],
        prompt_end="<|start|>assistant",
    ),
    sample(
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary"
        "<|message|>{}<|call|>",
        (("now", "{}"),),
        "I look.",
        prompt_end="<|start|>assistant",
    ),
    sample(
        "openai",
        "Hello <|channel|>commentary there, no head",
        (),
        "Hello <|channel|>commentary there, no head",
        prompt_end="<|start|>assistant",
    ),
    sample("openai", "x" * 3000, (), "x" * 3000, prompt_end="<|start|>assistant"),
    sample(
        "openai",
        "deep<|end|>",
        (),
        "",
        reasoning="deep",
        prompt_end="<|start|>assistant<|channel|>analysis<|message|>",
    ),
]
