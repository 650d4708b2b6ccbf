"""What packed weights, 8-bit activations and stored K and V cost: perplexity and KL divergence.

    python bench/quality.py MODEL.gguf [--kl] [--llama-cpp] [--tokens 20000] [--json]
        [--kv-cache-dtype bf16,fp16,int8] [--checkpoints DIRECTORY …] [--quantization int8,fp8]

The reference is the same weights dequantised to float32, which are multiplied with float32
activations, with K and V in bf16 as is usual, or in fp16, the finest format, where formats are
compared. A fixed text runs through both in windows of 512 tokens. Perplexity counts every token of
a window but the first. `--kl` adds KL(float32 || model) of the next-token distributions, over the
second half of each window, as llama.cpp's `llama-perplexity` has it; `--llama-cpp` runs that on the
same files, text and windows. `--checkpoints` are read beside the model, with its tokenizer.

The text: chapters 1 to 9 of Herman Melville, Moby-Dick (1851, public domain), 24,399 tokens of
SmolLM2 and 23,426 of Gemma 3.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt

from invar.config import EngineConfig
from invar.engine.loader import LoadedModel, load_engine
from invar.engine.sampling_params import SamplingParams
from invar.weights.formats import QuantType
from invar.weights.gguf import GGUFFile
from invar.weights.gguf_writer import GGUFWriter

TEXT = Path(__file__).parent / "text" / "moby_dick.txt"
WINDOW = 512  # llama-perplexity's default context
STEP = 64  # rows that the head computes at a time: one step of so many leaves all its logits


def dequantised(model: Path, target: Path) -> Path:
    """The model with its quantised tensors in float32; written once."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with GGUFFile(model) as source:
        metadata = {key: source.metadata[key] for key in source.metadata}
        metadata["general.file_type"] = 0  # LLAMA_FTYPE_ALL_F32
        writer = GGUFWriter(target, metadata)
        for name, info in source.tensors.items():
            writer.add_tensor(
                name, info.shape, QuantType.F32, lambda name=name: source.dequantize(name)
            )
        writer.write()
    return target


def load(
    rows: int,
    path: Path,
    kv_cache_dtype: str,
    tokenizer: Path | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    return load_engine(
        EngineConfig(
            model=str(path),
            tokenizer=None if tokenizer is None else str(tokenizer),
            quantization=quantization,
            max_model_len=WINDOW + 1,
            max_num_seqs=1,
            max_num_batched_tokens=rows,
            kv_cache_dtype=kv_cache_dtype,
        )
    )


def windows(model: LoadedModel, text: str, tokens: int) -> Iterator[npt.NDArray[np.int32]]:
    """Whole windows of at least `tokens` tokens together, each beginning as the model wants it."""
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    begin = model.tokenizer.encode("", add_special_tokens=True)  # BOS, or nothing
    if len(ids) < tokens + WINDOW:
        raise SystemExit(f"--tokens {tokens}: the text has {len(ids) // WINDOW * WINDOW}")
    for start in range(0, tokens + WINDOW - 1, WINDOW):
        window = np.array(ids[start : start + WINDOW], np.int32)
        window[: len(begin)] = begin
        yield window


def run(
    model: LoadedModel, window: npt.NDArray[np.int32], want_logits: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32] | None]:
    """Log-probabilities of the tokens 1 … of a window, ``[511]``, and, where wanted, those of all
    tokens that may follow the tokens of its second half, ``[256, vocab]``."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    (request,) = model.door.resolve("window", window, params)
    model.engine.add_request(request)
    steps = []
    while model.engine.has_unfinished:
        outputs = model.engine.step()
        if want_logits:
            steps.append(model.engine.runner.logits(STEP)[:, : model.info.vocab_size].copy())
    scored = np.array([row.logprob for row in outputs[0].prompt_logprobs if row])  # None: token 0
    if not want_logits:
        return scored, None
    logits = np.concatenate(steps[len(steps) // 2 :])
    logits -= logits.max(axis=1, keepdims=True)
    total = np.exp(logits).sum(axis=1, dtype=np.float64, keepdims=True)
    return scored, logits - np.log(total).astype(np.float32)


@dataclass
class Scores:
    """Of one model, window by window."""

    pairs: list[tuple[npt.NDArray[np.float64], ...]] = field(default_factory=list)
    divergences: list[npt.NDArray[np.float32]] = field(default_factory=list)
    same: list[npt.NDArray[np.bool_]] = field(default_factory=list)


def measure(
    models: Mapping[str, LoadedModel], reference: LoadedModel, text: str, tokens: int, kl: bool
) -> dict[str, dict[str, float]]:
    """Of each model by its name; the reference reads the text once."""
    found = {name: Scores() for name in models}
    for window in windows(reference, text, tokens):
        exact_score, exact = run(reference, window, kl)
        for name, scores in found.items():
            score, ours = run(models[name], window, kl)
            scores.pairs.append((score, exact_score))
            if ours is not None and exact is not None:
                scores.divergences.append((np.exp(exact) * (exact - ours)).sum(axis=1))
                scores.same.append(ours.argmax(axis=1) == exact.argmax(axis=1))
    return {name: summary(scores) for name, scores in found.items()}


def summary(scores: Scores) -> dict[str, float]:
    scored = np.array(scores.pairs)  # [windows, 2, 511]
    perplexity, exact_perplexity = np.exp(-scored.mean(axis=(0, 2)))
    report = {
        "tokens": scored[:, 0].size,
        "perplexity": float(perplexity),
        "perplexity_float32": float(exact_perplexity),
        "perplexity_ratio": float(perplexity / exact_perplexity),
    }
    if scores.divergences:
        divergence = np.concatenate(scores.divergences)
        report["kl_mean"] = float(divergence.mean())
        report["kl_99"] = float(np.quantile(divergence, 0.99))
        report["same_top"] = float(np.concatenate(scores.same).mean())
    return report


def llama_cpp_quality(model: Path, reference: Path, threads: int) -> dict[str, float]:
    """The same figures by llama-perplexity, over the same windows of the same text."""
    binary = str(llama_cpp.build(threads, "llama-perplexity") / "llama-perplexity")
    base = reference.with_suffix(".logits")
    common = ["-f", str(TEXT), "-c", str(WINDOW), "-t", str(threads)]
    common += ["--kl-divergence-base", str(base)]
    try:
        if not base.exists():
            subprocess.run([binary, "-m", str(reference), *common], check=True, capture_output=True)
        command = [binary, "-m", str(model), *common, "--kl-divergence"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    finally:
        base.unlink(missing_ok=True)  # gigabytes
    fields = {
        "perplexity": r"Mean PPL\(Q\)\s*:\s*([\d.]+)",
        "perplexity_float32": r"Mean PPL\(base\)\s*:\s*([\d.]+)",
        "perplexity_ratio": r"Mean PPL\(Q\)/PPL\(base\)\s*:\s*([\d.]+)",
        "kl_mean": r"Mean\s+KLD:\s*([-\d.]+)",
        "kl_99": r"99\.0%\s+KLD:\s*([-\d.]+)",
        "same_top": r"Same top p:\s*([\d.]+)",
    }
    found = {name: re.search(pattern, done.stdout) for name, pattern in fields.items()}
    figures = {name: float(match[1]) for name, match in found.items() if match}
    return figures | {"same_top": figures["same_top"] / 100}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000, help="at least; whole windows")
    parser.add_argument("--kl", action="store_true", help="the divergence too")
    parser.add_argument(
        "--kv-cache-dtype", metavar="NAME,…", default="bf16", help="each of these formats"
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        nargs="*",
        default=[],
        help="the same model as directories (tests/quality/convert.py)",
    )
    parser.add_argument(
        "--quantization",
        metavar="NAME,…",
        help="the float32 copy, brought to these as it is loaded",
    )
    parser.add_argument("--llama-cpp", action="store_true", help="llama-perplexity beside it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--scratch", type=Path, help="folder for the float32 copy of the model")
    arguments = parser.parse_args()
    scratch = arguments.scratch or llama_cpp.cache_folder().parent.parent / "float32"
    copy = dequantised(arguments.model, scratch / f"{arguments.model.stem}.f32.gguf")
    formats = arguments.kv_cache_dtype.split(",")
    loaded = partial(load, STEP if arguments.kl else WINDOW)
    reference = loaded(copy, "bf16" if formats == ["bf16"] else "fp16")
    models = {
        "invar" if name == "bf16" else f"invar {name}": loaded(arguments.model, name)
        for name in formats
    }
    for path in arguments.checkpoints:
        models[path.name] = loaded(path, formats[0], tokenizer=arguments.model)
    for name in filter(None, (arguments.quantization or "").split(",")):
        models[f"--quantization {name}"] = loaded(copy, formats[0], quantization=name)
    text = TEXT.read_text(encoding="utf-8")
    report = measure(models, reference, text, arguments.tokens, arguments.kl)
    for model in (reference, *models.values()):
        model.close()
    if arguments.llama_cpp:
        report["llama.cpp"] = llama_cpp_quality(arguments.model, copy, arguments.threads)
    if arguments.json:
        print(json.dumps({"model": arguments.model.name} | report))
        return
    print(arguments.model.name)
    for engine, figures in report.items():
        for name, value in figures.items():
            print(f"  {engine:<10} {name:<20} {value:,.5f}")


if __name__ == "__main__":
    main()
