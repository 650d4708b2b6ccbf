"""tokenizer.json gives the tokenizer of the same model's GGUF file, and says what it lacks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
from golden import tiny_tokenizer
from golden.tiny_tokenizer import hf_files, tokenizer_metadata
from golden.tokenizer_forms import HERE

from invar.text.chat_template import ChatTemplate
from invar.text.errors import TokenizerError
from invar.text.tokenizer import Tokenizer
from invar.text.tokenizer_files import with_tokenizer
from invar.weights.hf_directory import text_files

TEXTS = (
    "",
    "the winner on a table: naïve 日本語 \x00 👩‍🚀\n",
    "<|im_start|>user\nhello<|im_end|>",
    "  two  blanks<|eos|> and <|im_start",
)


@pytest.fixture
def files() -> dict[str, Any]:
    return copy.deepcopy(hf_files())


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("parse_special", [True, False])
def test_it_encodes_as_the_gguf_form_does(
    files: dict[str, Any], text: str, parse_special: bool
) -> None:
    gguf, hf = Tokenizer.from_gguf(tokenizer_metadata()), Tokenizer.from_hf(files)
    ids = hf.encode(text, parse_special=parse_special)
    assert ids.tolist() == gguf.encode(text, parse_special=parse_special).tolist()
    for skip in (True, False):
        decoded = hf.decode(ids, skip_special_tokens=skip)
        assert decoded == gguf.decode(ids, skip_special_tokens=skip)
    assert hf.stop_token_ids == {tiny_tokenizer.EOS, tiny_tokenizer.IM_END}
    assert (hf.bos_token_id, hf.eos_token_id) == (gguf.bos_token_id, gguf.eos_token_id)
    assert hf.vocab_size == gguf.vocab_size


def test_text_never_becomes_a_control_token_where_whole_words_are_looked_up(
    files: dict[str, Any],
) -> None:
    model = files["tokenizer.json"]["model"]
    model["ignore_merges"] = True
    model["vocab"]["eos"] = tiny_tokenizer.EOS
    files["tokenizer.json"]["added_tokens"][1]["content"] = "eos"
    files["tokenizer_config.json"]["eos_token"] = "eos"
    tokenizer = Tokenizer.from_hf(files)
    assert tokenizer.encode("eos").tolist() == [tiny_tokenizer.EOS]
    assert tiny_tokenizer.EOS not in tokenizer.encode("eos", parse_special=False)


def test_a_template_adds_bos(files: dict[str, Any]) -> None:
    pieces = [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A"}}]
    template = {"type": "TemplateProcessing", "single": pieces}
    byte_level = files["tokenizer.json"]["decoder"]
    files["tokenizer.json"]["post_processor"] = {
        "type": "Sequence",
        "processors": [byte_level, template],
    }
    tokenizer = Tokenizer.from_hf(files)
    assert tokenizer.add_bos
    assert tokenizer.encode("a").tolist() == [tiny_tokenizer.BOS, 97]
    pieces[0]["SpecialToken"]["id"] = "<s>"
    with pytest.raises(TokenizerError, match="<s> is unknown"):
        Tokenizer.from_hf(files)


def sentence_pieces(scheme: str) -> dict[str, Any]:
    """A vocabulary of pieces with bytes to fall back on, as Mistral's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abc"]
    pieces += ["▁a", "ab"]
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "tokenizer.json": {
            "added_tokens": [
                {"id": i, "content": pieces[i], "special": True, **flags} for i in range(3)
            ],
            "pre_tokenizer": space,
            "decoder": {"type": "Sequence", "decoders": steps},
            "model": {
                "type": "BPE",
                "vocab": {piece: index for index, piece in enumerate(pieces)},
                "merges": ["▁ a", "a b"],
                "unk_token": "<unk>",
                "byte_fallback": True,
                "fuse_unk": True,
            },
        },
        "tokenizer_config.json": {
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "add_bos_token": True,
        },
    }


def test_pieces_with_bytes_and_a_space_before_the_start_alone() -> None:
    first, always = (Tokenizer.from_hf(sentence_pieces(s)) for s in ("first", "always"))

    def shown(tokenizer: Tokenizer, text: str) -> list[str]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return [tokenizer.decode([i], skip_special_tokens=False) or "▁" for i in ids]

    assert first.encode("a").tolist()[0] == 1
    assert len(first.encode("a</s>a", add_special_tokens=False)) == 3
    assert shown(first, "a</s>b") == ["a", "</s>", "b"]
    assert shown(always, "a</s>b") == ["a", "</s>", "▁", "b"]
    assert first.decode(first.encode("ab cé")) == "ab cé"
    assert first.encode("</s>", parse_special=False).tolist().count(2) == 0


def test_templates_in_each_place(files: dict[str, Any]) -> None:
    config = files["tokenizer_config.json"]
    messages = [{"role": "user", "content": "hi"}]

    def rendered() -> str | None:
        template = ChatTemplate.from_hf(files)
        return template and template.render(messages)

    assert rendered() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    config["chat_template"] = [
        {"name": "default", "template": "{{ bos_token }}plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    assert rendered() == "<|bos|>plain"
    files["chat_template.jinja"] = "{{ eos_token }}file"
    assert rendered() == "<|eos|>file"
    del files["chat_template.jinja"], config["chat_template"]
    assert rendered() is None


def edited(path: str, value: Any) -> dict[str, Any]:
    files = copy.deepcopy(hf_files())
    *parents, last = path.split("/")
    place: Any = files
    for name in parents:
        place = place[int(name) if isinstance(place, list) else name]
    if value is None:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return files


FAULTS: dict[str, tuple[str, Any, str]] = {
    "no tokenizer": ("tokenizer.json", None, "has no tokenizer.json"),
    "no model": ("tokenizer.json/model", None, "has no model with a vocab"),
    "a vocab of text": ("tokenizer.json/model/vocab", "abc", "has no model with a vocab"),
    "an id of text": ("tokenizer.json/model/vocab/a", "3", "token 'a' has id 3"),
    "an id far away": ("tokenizer.json/model/vocab/a", 10**7, "ids go up to 10000000"),
    "a negative id": ("tokenizer.json/model/vocab/a", -1, "token 'a' has id -1"),
    "a merge of nothing": ("tokenizer.json/model/merges/0", "xx yy", "tokenizer.json"),
    "an unknown model": ("tokenizer.json/model/type", "Magic", "tokenizer.json"),
    "an added token without id": ("tokenizer.json/added_tokens/0", {}, "has no id"),
    "an eos that is no token": ("tokenizer_config.json/eos_token", "<end>", "eos_token '<end>'"),
    "a stop beyond": ("generation_config.json/eos_token_id", [9**9], "outside the vocabulary"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_is_wrong_is_named(what: str) -> None:
    path, value, message = FAULTS[what]
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_hf(edited(path, value))


def test_damaged_characters_are_refused_before_the_library_meets_them(
    files: dict[str, Any],
) -> None:
    damaged = {"type": "Precompiled", "precompiled_charsmap": "AAEAAP////8="}
    files["tokenizer.json"]["normalizer"] = {"type": "Sequence", "normalizers": [damaged]}
    with pytest.raises(TokenizerError, match="normalizer: precompiled_charsmap is damaged"):
        Tokenizer.from_hf(files)


# ------------------------------------------------------------------------- hostile files

NONSENSE: list[Any] = [
    None, True, 0, -1, 2**31, 10**30, 1.5, "", "x", "<s>", [], {}, [[]], [None], {"x": None},
    {"type": "X"}, ["a", "b"], "a" * 10_000, {"type": "Sequence"}, {"Regex": "(a+)+$"},
    {"type": "Sequence", "normalizers": [{}], "pretokenizers": 1},
]  # fmt: skip
FORMS = {
    "byte level": hf_files,
    **{
        name: partial(lambda name: with_tokenizer(text_files(HERE / name)), name)
        for name in ("gemma", "gpt2", "unigram", "normalized")
    },
}


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All of a document's inner places; of long lists and objects the first few."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in islice(inner, 4):
        yield (*here, key)
        if isinstance(child, dict | list):
            yield from places(child, (*here, key))


def put(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    changed = copy.copy(document)
    changed[place[0]] = put(document[place[0]], place[1:], value)
    return changed


@pytest.mark.parametrize("form", FORMS)
def test_nonsense_anywhere_gives_a_tokenizer_or_one_short_error(form: str) -> None:
    files, tried, longest = dict(FORMS[form]()), 0, ""
    for name in {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} & set(files):
        for place in places(files[name]):
            for value in NONSENSE:
                changed = {**files, name: put(files[name], place, value)}
                tried += 1
                try:
                    tokenizer = Tokenizer.from_hf(changed)
                    tokenizer.decode(tokenizer.encode("hello <s> wörld 12").tolist())
                except TokenizerError as error:
                    longest = max(longest, str(error), key=len)
    assert len(longest) < 400, longest
    assert tried > 200
