"""Which family of models writes replies how: a row a family, under the names of vLLM's and SGLang's
parsers."""

from __future__ import annotations

from typing import Any

from invar.text.argument_writing import Tags
from invar.text.call_formats import LIST, BareKeyCalls, HeadedCalls, JsonCalls, PythonCalls
from invar.text.channel_formats import AddressedFormat, HarmonyFormat, RecipientFormat
from invar.text.element_calls import ElementCalls
from invar.text.reply import CallFormat, ReasoningMarkers, ReplyFormat


def deepseek(**shape: Any) -> HeadedCalls:
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    return HeadedCalls(
        section=section, open="<｜tool▁call▁begin｜>", close="<｜tool▁call▁end｜>", **shape
    )


def tags_of(name: str) -> tuple[str, str]:
    return f"<{name}>", f"</{name}>"


def json_tags(name: str, **shape: Any) -> JsonCalls:
    opener, close = tags_of(name)
    return JsonCalls(openers=(opener,), close=close, **shape)


def named_tags(call: str, argument: str, section: str | None = None, **shape: Any) -> HeadedCalls:
    """Tags with an attribute that names what stands between them."""
    return HeadedCalls(
        section=None if section is None else tags_of(section),
        open=f'<{call} name="',
        head_ends=('">',),
        close=f"</{call}>",
        tags=Tags(open=f'<{argument} name="', head_end='">', close=f"</{argument}>", **shape),
    )


def dsml(section: str) -> HeadedCalls:
    return named_tags(
        "｜DSML｜invoke",
        "｜DSML｜parameter",
        f"｜DSML｜{section}",
        key=r'(?P<key>.+?)"\s+string="(?P<text>true|false)',
        writes='$key" string="$text',
    )


def function_tags(section: str) -> HeadedCalls:
    return HeadedCalls(
        section=tags_of(section),
        shares_section=False,
        open="<function=",
        head_ends=(">",),
        close="</function>",
        tags=Tags(open="<parameter=", head_end=">", close="</parameter>", trims=True),
    )


def key_value_tags(
    suffix: str, head_ends: tuple[str, ...], section: tuple[str, str] | None = None
) -> HeadedCalls:
    close = f"</tool_call{suffix}>"
    return HeadedCalls(
        section=section,
        open=f"<tool_call{suffix}>",
        head_ends=(*head_ends, close),
        writes_end="$blank" if head_ends[0] == "\n" else head_ends[0],
        close=close,
        tags=Tags(
            open=f"<arg_key{suffix}>",
            head_end=f"<arg_value{suffix}>",
            key=rf"(?P<key>.+?)</arg_key{suffix}>",
            writes=f"$key</arg_key{suffix}>$blank",
            close=f"</arg_value{suffix}>",
        ),
    )


MISTRAL = HeadedCalls(
    open="[TOOL_CALLS]",
    head_ends=("[ARGS]",),
    head=r"(?P<name>.+?)(\[CALL_ID\](?P<id>\w+))?",
    id_length=9,
)
WITH_PARAMETERS = '{"name": "$name", "parameters": $arguments}'
LLAMA_JSON = JsonCalls(
    openers=("<|python_tag|>",), bare="{", writes=WITH_PARAMETERS, joins=("", "; ", "")
)
LLAMA_PYTHON = PythonCalls(
    openers=("<|python_start|>", "<|python_tag|>"), close="<|python_end|>", bare="["
)
HERMES = json_tags("tool_call")
MINIMAX_MARK = "]<]minimax[>["
MINIMAX_M3 = ElementCalls(
    section=(f"{MINIMAX_MARK}<tool_call>", f"{MINIMAX_MARK}</tool_call>"),
    open=f'{MINIMAX_MARK}<invoke name="',
    head_ends=('">',),
    close=f"{MINIMAX_MARK}</invoke>",
    mark=MINIMAX_MARK,
)

CALL_FORMATS: dict[str, tuple[CallFormat, ...]] = {
    "hermes": (HERMES,),
    "llama3_json": (LLAMA_JSON,),
    "llama4_pythonic": (LLAMA_PYTHON, LLAMA_JSON),
    "mistral": (MISTRAL, JsonCalls(openers=("[TOOL_CALLS]",), joins=LIST, id_length=9)),
    "deepseek_v3": (
        deepseek(
            head=r"function<｜tool▁sep｜>(?P<name>.+)",
            writes="function<｜tool▁sep｜>$name",
            head_ends=("\n```json\n",),
            fence="```",
        ),
    ),
    "deepseek_v31": (deepseek(head_ends=("<｜tool▁sep｜>",)),),
    "deepseek_v32": (dsml("function_calls"),),
    "deepseek_v4": (dsml("tool_calls"),),
    "qwen3_xml": (function_tags("tool_call"),),
    "seed_oss": (function_tags("seed:tool_call"),),
    "glm45": (key_value_tags("", ("\n", "<arg_key>")),),
    "hy3": (
        key_value_tags(
            ":opensource",
            ("<tool_sep:opensource>",),
            ("<tool_calls:opensource>", "</tool_calls:opensource>"),
        ),
    ),
    "granite": (
        JsonCalls(openers=("<|tool_call|>",), joins=LIST),
        json_tags("tool_call", joins=LIST),
    ),
    "granite-20b-fc": (JsonCalls(openers=("<function_call>",)),),
    "firefunction": (JsonCalls(openers=("functools",), joins=LIST),),
    "phi4_mini_json": (
        JsonCalls(openers=("<|tool_call|>",), close="<|/tool_call|>", joins=LIST),
        JsonCalls(openers=("functools",), joins=LIST),
    ),
    "kimi_k2": (
        HeadedCalls(
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            open="<|tool_call_begin|>",
            head=r"(?P<id>(?:functions\.)?(?P<name>.+?)(?::\d+)?)",
            writes="functions.$name:$index",
            head_ends=("<|tool_call_argument_begin|>",),
            close="<|tool_call_end|>",
        ),
    ),
    "kimi_k3": (
        HeadedCalls(
            section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            open="<|open|>call ",
            head=r'tool="(?P<name>[^"]+)".*',
            writes='tool="$name" index="$index"',
            head_ends=("<|sep|>",),
            close="<|close|>call<|sep|>",
            tags=Tags(
                open="<|open|>argument ",
                head_end="<|sep|>",
                key=r'key="(?P<key>[^"]*)"(?:\s+type="(?P<text>\w+)")?.*',
                writes='key="$key" type="$type"',
                close="<|close|>argument<|sep|>",
            ),
        ),
    ),
    "minimax_m2": (named_tags("invoke", "parameter", "minimax:tool_call"),),
    "minimax_m3": (MINIMAX_M3,),
    "minicpm5": (named_tags("function", "param", cdata=True),),
    "cohere": (
        JsonCalls(
            openers=("<|START_ACTION|>",),
            close="<|END_ACTION|>",
            writes='{"tool_call_id": "$index", "tool_name": "$name", "parameters": $arguments}',
            joins=LIST,
        ),
    ),
    "command_r_plus": (
        JsonCalls(
            openers=("Action: ```json", "Action:```json", "Action:\n```json"),
            close="```",
            writes='{"tool_name": "$name", "parameters": $arguments}',
            joins=LIST,
        ),
    ),
    "functionary_v31": (HeadedCalls(open="<function=", head_ends=(">",), close="</function>"),),
    "lfm2": (PythonCalls(openers=("<|tool_call_start|>",), close="<|tool_call_end|>"),),
    "gemma4": (BareKeyCalls(open="<|tool_call>", close="<tool_call|>", quote='<|"|>'),),
    "functiongemma": (
        BareKeyCalls(
            open="<start_function_call>", close="<end_function_call>", quote="<escape>"
        ),
    ),
    "olmo3": (
        PythonCalls(
            openers=("<function_calls>",), close="</function_calls>", joins=("", "\n", "")
        ),
    ),
    "longcat": (json_tags("longcat_tool_call"),),
    "internlm": (
        JsonCalls(
            openers=("<|action_start|><|plugin|>",), close="<|action_end|>", writes=WITH_PARAMETERS
        ),
    ),
    "nemotron": (json_tags("TOOLCALL", joins=LIST),),
    "minimax": (json_tags("tool_calls", joins=LIST),),
    "apertus": (
        JsonCalls(
            openers=("<|tools_prefix|>",),
            close="<|tools_suffix|>",
            keyed=True,
            writes='{"$name": $arguments}',
            joins=LIST,
        ),
    ),
    "gigachat3": (
        JsonCalls(openers=("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n")),
    ),
    "solar_open": (
        HeadedCalls(
            section=("<|tool_calls|>", "<|calls|>"),
            open="<|tool_call:begin|>",
            head=r"(?P<id>.*?)<\|tool_call:name\|>(?P<name>.+)",
            writes="$id<|tool_call:name|>$name",
            head_ends=("<|tool_call:args|>",),
            close="<|tool_call:end|>",
        ),
    ),
}  # fmt: skip
WHOLE_FORMATS: dict[str, ReplyFormat] = {
    "openai": HarmonyFormat(),
    "functionary_v32": RecipientFormat(),
    "muse_glimmer": AddressedFormat(
        named_tags("atem:invoke", "atem:parameter", "atem:function_calls")
    ),
}
# Other names of vLLM (vllm/tool_parsers/__init__.py) and SGLang
# (python/sglang/srt/function_call/function_call_parser.py).
ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "mimo": "qwen3_xml",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "pythonic": "llama4_pythonic",
    "jamba": "minimax",
    "hunyuan_a13b": "minimax",
    "hy_v3": "hy3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "qwen3_coder": "qwen3_xml",
    "step3p5": "qwen3_xml",
    "nemotron_v3": "qwen3_xml",
    "glm": "glm45",
    "glm47": "glm45",
    "hunyuan": "hy3",
    "granite4": "hermes",
    "ernie45": "hermes",
    "minimax-m2": "minimax_m2",
    "minimax_m1": "minimax",
    "apriel": "minimax",
    "command_r": "cohere",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "gpt-oss": "openai",
    "harmony": "openai",
    "solar": "solar_open",
    "minimax-m3": "minimax_m3",
    "muse": "muse_glimmer",
    "llama": "llama3_json",
    "gemma": "gemma4",
    "fireworks": "firefunction",
}

THINK = ReasoningMarkers("<think>", "</think>")
REASONING: dict[str, ReasoningMarkers] = {
    "think": THINK,
    "deepseek_r1": ReasoningMarkers("<think>", "</think>", opened=True),
    "magistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "gemma4": ReasoningMarkers("<|channel>thought", "<channel|>"),
    "cohere": ReasoningMarkers(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "kimi_k3": ReasoningMarkers(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        dropped=(
            *("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
            "<|close|>message<|sep|>",
        ),
    ),
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>"),
    "minimax_m3": ReasoningMarkers("<mm:think>", "</mm:think>"),
    "hy3": ReasoningMarkers("<think:opensource>", "</think:opensource>"),
    "solar_open": ReasoningMarkers(
        "<|think|>", "<|end|>", dropped=("<|begin|>assistant", "<|content|>")
    ),
    "apriel": ReasoningMarkers(
        "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", dropped=("[END FINAL RESPONSE]",)
    ),
}
REASONING_ALIASES = {
    **dict.fromkeys(
        (
            *("qwen3", "qwen3-thinking", "glm45", "deepseek_v3", "deepseek-v3", "deepseek_v31"),
            *("granite", "kimi", "kimi_k2", "nemotron", "nemotron_v3", "minimax_m2", "minimax"),
            *("olmo3", "ernie45", "hunyuan_a13b", "holo2", "interns1", "longcat", "mimo"),
            *("step3", "step3p5", "smollm3", "exaone", "nano_v3", "deepseek_v4", "poolside_v1"),
        ),
        "think",
    ),
    **dict.fromkeys(
        ("deepseek-r1", "minimax_m2_append_think", "minimax-append-think"), "deepseek_r1"
    ),
    "mistral": "magistral",
    "command_a": "cohere",
    "cohere_command3": "cohere",
    "gemma": "gemma4",
    "seedoss": "seed_oss",
}

# What a format is known by where a template does not write calls into a history: a text in the
# template or a token of the vocabulary. The first that is there.
SIGNS: tuple[tuple[str, str], ...] = (
    ("openai", "<|channel|>"),
    ("lfm2", "<|tool_call_start|>"),
    ("gemma4", "<|tool_call>"),
    ("functiongemma", "<start_function_call>"),
    ("phi4_mini_json", "<|/tool_call|>"),
    ("granite", "<|tool_call|>"),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
    ("mistral", "[TOOL_CALLS]"),
    ("cohere", "<|START_ACTION|>"),
    ("firefunction", "functools["),
    ("llama4_pythonic", "<|python_start|>"),
    ("llama3_json", "<|python_tag|>"),
    ("hermes", "<tool_call>"),
)
# The same for thoughts, but for those that calls of the same family betray.
REASONING_SIGNS: tuple[tuple[str, str], ...] = tuple(
    (name, markers.start)
    for name, markers in REASONING.items()
    if not markers.opened and name != "solar_open"
)
