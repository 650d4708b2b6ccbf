"""How byte-level BPE vocabularies cut text into words before merging.

A GGUF file carries only a name (`tokenizer.ggml.pre`); the regular expressions behind it are facts
of the models' own tokenizer.json files. Names, groups and the expressions that llama.cpp quotes as
originals: https://github.com/ggml-org/llama.cpp/blob/b11434/src/llama-vocab.cpp

Each expression is one isolated split of what the previous ones left whole, text between matches is
kept. The dialect is Oniguruma's (the `tokenizers` library).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from invar.text.errors import TokenizerError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_NEWLINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION_RUN = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

# GPT-2's expression; as a Split it needs the last alternative, or single spaces join no word.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _llama3_like(digits: str, letters: str = r"\p{L}+", other: str = _PUNCTUATION_RUN) -> str:
    """The family that llama 3 began: contractions, words, digit groups, punctuation, blanks."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}|{other}|{_NEWLINES_AND_SPACES}"
    )


def _cased_words(digits: str, *, contraction: str = "") -> str:
    """The family of o200k and tekken: a word breaks where lower case turns into upper case."""
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_NEWLINES_AND_SPACES}"
    )


_LLAMA3 = _llama3_like(r"\p{N}{1,3}")
_QWEN2 = _llama3_like(r"\p{N}")
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
# Cased letters of an older Unicode; escaped, because normalising an editor would change them.
_DEEPSEEK_LETTERS = (
    r"\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_SENTENCE_MARKS = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What a pre-tokenizer name stands for.

    `ignore_merges`: a word that is a token as a whole is taken as that token, merges or not.
    `add_bos`: the default where the file has no `tokenizer.ggml.add_bos_token`.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    (
        "minicpm5",
        PreTokenizer((r"\p{N}{1,3}", _llama3_like(r"\p{N}+")), ignore_merges=True),
    ),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    (
        "qwen35",
        PreTokenizer(
            (_llama3_like(r"\p{N}", r"[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)
        ),
    ),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _QWEN2))),
    ("seed-coder", PreTokenizer((_llama3_like(r"\p{N}", other=r" ?[^\s\p{L}\p{N}\r\n]+"),))),
    ("ufakzeka", PreTokenizer((_QWEN2.removeprefix(_CONTRACTION + "|"),))),
    (
        "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe"
        " gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4",
        PreTokenizer((_GPT2,)),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        "falcon",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ),
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                _DEEPSEEK_LETTERS,
                r"\s?[!-/:-~！-／：-～‘-‟" + "\u3000-。]+",
                r"\s+$",
                r"[一-龥ࠀ-一가-퟿]+",
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK3_WORDS}[\r\n]*|{_NEWLINES_AND_SPACES}")),
    ),
    (
        "spark2_5",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _CJK,
                rf"{_DEEPSEEK3_WORDS}|[\r\n]|\s+(?!\S)|\s+",
                r"\p{N}",
            )
        ),
    ),
    (
        "tekken",
        PreTokenizer((_cased_words(r"\p{N}"),), ignore_merges=True, add_bos=True),
    ),
    (
        "gpt-4o llama4 kanana2 talkie minimax-m2",
        PreTokenizer((_cased_words(r"\p{N}{1,3}", contraction=_CONTRACTION + "?"),)),
    ),
    (
        "granite-embed-multi-97m",
        PreTokenizer(
            (_cased_words(r"\p{N}{1,3}", contraction=_CONTRACTION + "?"),), ignore_merges=True
        ),
    ),
    (
        "tiny_aya cohere2moe",
        PreTokenizer(
            (
                r"\d{1,3}(?=(?:\d{3})*\b)",
                _cased_words(r"\p{N}{1,3}", contraction=_CONTRACTION + "?"),
            )
        ),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        "jais-2",
        PreTokenizer(
            (
                _LLAMA3.removesuffix(r"\s+(?!\S)|\s+")
                + "".join(rf"\s{{{width}}}(?!\S)|" for width in (512, 256, 128, 64, 32, 16, 8, 4))
                + r"\s{1,2}(?!\S)|\s{1}",
            )
        ),
    ),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_SENTENCE_MARKS,))),
    ("viking", PreTokenizer((_SENTENCE_MARKS, r"\p{N}"))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    (
        "chameleon",
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
)

_BY_NAME = {name: pre for names, pre in _GROUPS for name in names.split()}


def pretokenizer_by_name(name: str) -> PreTokenizer:
    """Look a `tokenizer.ggml.pre` name up; an unknown name is an error, never a silent default."""
    known = _BY_NAME.get(name)
    if known is not None:
        return known
    near = difflib.get_close_matches(name, _BY_NAME, n=3, cutoff=0.5)
    advice = (
        f"nearest known: {', '.join(near)}" if near else f"known: {', '.join(sorted(_BY_NAME))}"
    )
    raise TokenizerError(
        f"tokenizer.ggml.pre: pre-tokenizer {name!r} is not known ({advice}); "
        "another rule would give other token ids, so none is guessed"
    )
