"""Makes small tokenizers in the files that are not tokenizer.json, and the ids of hard texts. By
hand, where transformers, sentencepiece and tiktoken are:

    PYTHONPATH=.:tests python tests/golden/make_tokenizers.py

Ids are those of `transformers`, of tiktoken for its own form.
"""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
import tokenizers
import transformers
from golden.tokenizer_forms import HERE, SPECIALS, TEXTS

ROOT = Path(__file__).parents[2]
OTHER_LANGUAGES = (
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "Les naïfs ægithales hâtifs pondant à Noël où il gèle.",
    "日本語の文章をトークンに分割する。",
    "Привет, мир! Как дела?",
    "안녕하세요 세계",
    "123 456 7890 e = mc²",
)
RULES = "FB01\t66 69\nFF21\t41\nFF22\t42\n3000\t20\n"  # a ligature, wide letters, a wide blank
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "llama": IDENTITY | {"vocab_size": 600, "byte_fallback": True, "split_digits": True},
    "gemma": IDENTITY
    | {"vocab_size": 600, "byte_fallback": True, "add_dummy_prefix": False}
    | {
        "user_defined_symbols": [
            "<start_of_turn>",
            "<end_of_turn>",
            "\n",
            "\n\n",
            "▁▁",
            "<unused0>",
        ]
    }
    | {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
    "normalized": {"vocab_size": 400, "normalization_rule_tsv": "rules"},
    "unigram": {"vocab_size": 400, "normalization_rule_tsv": "rules", "model_type": "unigram"},
    "unigram_bytes": IDENTITY | {"vocab_size": 600, "byte_fallback": True, "model_type": "unigram"},
}
BOUNDARIES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    lines = [line.strip() for page in pages for line in page.read_text().splitlines()]
    return [line for line in lines if line] + [*OTHER_LANGUAGES] * 3


def added(tokens: dict[int, str], special: bool = True) -> dict[str, Any]:
    shape = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {str(i): {"content": text, "special": special, **shape} for i, text in tokens.items()}


def train_sentencepiece(name: str, folder: Path) -> int:
    options = {"model_type": "bpe"} | SENTENCEPIECE[name]
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.write(RULES)
        rules.flush()
        if "normalization_rule_tsv" in options:
            options["normalization_rule_tsv"] = rules.name
        if name == "gemma":
            options |= {"bos_piece": "<bos>", "eos_piece": "<eos>", "pad_piece": "<pad>"}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus()),
            model_prefix=str(folder / "tokenizer"),
            hard_vocab_limit=False,
            character_coverage=0.99,
            num_threads=1,
            minloglevel=2,
            **options,
        )
    (folder / "tokenizer.vocab").unlink()
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return int(model.vocab_size())


def byte_level_bpe(pre: tokenizers.pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def make_sentencepiece(name: str, folder: Path) -> None:
    size = train_sentencepiece(name, folder)
    extra = dict(zip(range(size, size + len(SPECIALS)), SPECIALS, strict=True))
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    config |= {"added_tokens_decoder": added({0: "<unk>", 1: "<s>", 2: "</s>"} | extra)}
    if name == "gemma":
        config["tokenizer_class"] = "GemmaTokenizer"
        config["added_tokens_decoder"] = added(
            {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>"} | extra
        )
    if name in ("normalized", "unigram", "unigram_bytes"):
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        del config["add_bos_token"]
    write(folder, "tokenizer_config.json", config | (GEMMA if name == "gemma" else BOUNDARIES))


def make_byte_level(name: str, folder: Path) -> None:
    pre = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level_bpe(pre).model.save(str(folder))
    size = len(json.loads((folder / "vocab.json").read_text()))
    if name == "gpt2":
        vocab = json.loads((folder / "vocab.json").read_text())
        write(folder, "vocab.json", vocab | {"<|endoftext|>": size})
        write(folder, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
        write(folder, "added_tokens.json", dict(zip(SPECIALS, (size + 1, size + 2), strict=True)))
        return
    tokens = ("<|endoftext|>", *SPECIALS)
    numbered = dict(zip(range(size, size + len(tokens)), tokens, strict=True))
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added(numbered)}
    config |= {"bos_token": None, "eos_token": SPECIALS[1], "add_bos_token": False}
    config |= {"additional_special_tokens": list(SPECIALS)}
    write(folder, "tokenizer_config.json", config)


def make_tiktoken(folder: Path) -> tiktoken.Encoding:
    pre = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained = byte_level_bpe(pre)
    characters = {character: byte for byte, character in enumerate(byte_characters())}
    by_id = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    ranks = {bytes(characters[c] for c in text): rank for text, rank in by_id}
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    write(folder, "tokenizer.model", "\n".join(lines) + "\n")
    tokens = ("<|begin_of_text|>", "<|end_of_text|>", *SPECIALS)
    numbered = dict(zip(range(len(ranks), len(ranks) + len(tokens)), tokens, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokens[0]}
    config |= {"eos_token": tokens[1], "added_tokens_decoder": added(numbered)}
    write(folder, "tokenizer_config.json", config)
    write(folder, "config.json", {"model_type": "llama"})
    special = {text: token_id for token_id, text in numbered.items()}
    return tiktoken.Encoding(
        "tiny", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def byte_characters() -> list[str]:
    from golden.tiny_tokenizer import byte_characters

    return byte_characters()


def main() -> None:
    for name in (*SENTENCEPIECE, "gpt2", "qwen2", "llama3"):
        folder = HERE / name
        folder.mkdir(parents=True, exist_ok=True)
        if name == "llama3":
            encoding = make_tiktoken(folder)
            ids = [encoding.encode(text, allowed_special="all") for text in TEXTS]
        else:
            (make_sentencepiece if name in SENTENCEPIECE else make_byte_level)(name, folder)
            reference = transformers.AutoTokenizer.from_pretrained(folder)
            ids = [reference.encode(text, add_special_tokens=False) for text in TEXTS]
        write(folder, "expected.json", ids)
        print(f"{name}: {sum(map(len, ids))} tokens")


if __name__ == "__main__":
    main()
