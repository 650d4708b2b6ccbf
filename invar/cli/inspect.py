"""`invar inspect`: what is in a model file, and the memory it will take."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from invar.cli.engine_options import chosen_model
from invar.cli.parser import CommandParser, add_kv_format
from invar.cli.tables import size_text, table

if TYPE_CHECKING:
    from invar.engine.model_files import ModelFile

KV_LENGTHS = (512, 2048, 8192, 32768, 131072)
LONGEST_VALUE = 100  # characters of a metadata value in the table


def parser() -> CommandParser:
    parser = CommandParser("inspect", "Shows a model's metadata, tensors, formats and memory.")
    parser.model()
    parser.flag("--json", help="for programs")
    parser.flag("--tensors", help="list every tensor")
    parser.flag("--plan", help="steps and bytes a token before and after each pass")
    add_kv_format(parser)
    parser.value("--lengths", metavar="N,N", help="KV memory at these tokens, as 512,4096")
    return parser


def execute(args: argparse.Namespace) -> int:
    from invar.config import EngineConfig
    from invar.engine.model_files import open_model
    from invar.weights import sources

    lengths = wanted_lengths(args.lengths)
    kv_format = EngineConfig(kv_cache_dtype=args.kv_cache_dtype or "auto").kv_format
    with open_model(sources.resolve(chosen_model(args))) as source:
        report = describe(source, lengths, kv_format)
        if args.plan:
            report["plan"] = plan_of(source, lengths, kv_format)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        print(as_text(report, args.tensors))
    return 0


def wanted_lengths(given: str | None) -> Sequence[int] | None:
    if given is None:
        return None
    try:
        lengths = [int(item) for item in given.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise ValueError(f"--lengths {given[:60]}: write numbers of tokens, as 512,4096")
    return lengths


def describe(source: ModelFile, lengths: Sequence[int] | None, kv_format: str) -> dict[str, Any]:
    """Everything about a file, in JSON's types; K and V as they would be stored."""
    metadata = source.metadata
    formats: dict[str, dict[str, int]] = {}
    for info in source.tensors.values():
        entry = formats.setdefault(info.type.name, {"tensors": 0, "bytes": 0, "elements": 0})
        entry["tensors"] += 1
        entry["bytes"] += info.nbytes
        entry["elements"] += elements(info.shape)
    weights = sum(entry["bytes"] for entry in formats.values())
    context = counted(metadata.get(f"{metadata.get('general.architecture')}.context_length"))
    per_token = kv_bytes_per_token(source, kv_format)
    if lengths is None:
        lengths = [n for n in KV_LENGTHS if context is None or n <= context] or KV_LENGTHS[:1]
    return {
        "files": [str(path) for path in source.shard_paths],
        "gguf_version": getattr(source, "version", None),  # None: safetensors
        "architecture": metadata.get("general.architecture"),
        "name": metadata.get("general.name"),
        "parameters": sum(entry["elements"] for entry in formats.values()),
        "context_length": context,
        "metadata": {key: plain(metadata[key]) for key in metadata},
        "formats": formats,
        "tensors": [
            {
                "name": info.name,
                "shape": list(info.shape),
                "format": info.type.name,
                "bytes": info.nbytes,
            }
            for info in source.tensors.values()
        ],
        "memory": {
            "weights_bytes": weights,
            "kv_format": kv_format,
            "kv_bytes_per_token": per_token,
            "kv_bytes_per_request": (
                None if per_token is None else {str(n): per_token * n for n in lengths}
            ),
        },
    }


def plan_of(source: ModelFile, lengths: Sequence[int] | None, kv_format: str) -> dict[str, Any]:
    """How a step would run here, attention seeing the first of the lengths."""
    from invar.backends.cpu.memory import usable_threads
    from invar.backends.cpu.plan_report import report_plan
    from invar.graph.graph import KVFormat
    from invar.graph.passes import with_kv_format
    from invar.models import registry

    graph = with_kv_format(registry.build(source), KVFormat(kv_format))
    context = (lengths or KV_LENGTHS)[0]
    return report_plan(graph, source, context, usable_threads()).as_json()


def kv_bytes_per_token(source: ModelFile, kv_format: str) -> int | None:
    """Layers x KV heads x bytes of K and V of a head; None where the file tells no counts.

    KV heads count, not query heads. Layers with a sliding window are counted in full: today every
    layer keeps all of its tokens.
    """
    metadata = source.metadata
    prefix = metadata.get("general.architecture")
    layers = counted(metadata.get(f"{prefix}.block_count"))
    width = counted(metadata.get(f"{prefix}.embedding_length"))
    if layers is None or width is None:
        return None
    heads = metadata.get(f"{prefix}.attention.head_count")
    most_heads, _ = per_layer(heads, layers)
    _, kv_heads = per_layer(metadata.get(f"{prefix}.attention.head_count_kv", heads), layers)
    if most_heads is None or kv_heads is None:
        return None
    key = counted(metadata.get(f"{prefix}.attention.key_length", width // most_heads))
    value = counted(metadata.get(f"{prefix}.attention.value_length", key))
    if key is None or value is None:
        return None
    return kv_heads * (head_bytes(kv_format, key) + head_bytes(kv_format, value)) // 2


def head_bytes(kv_format: str, head_dim: int) -> int:
    """Of K and V of one token and head; of any size, since broken files are shown too."""
    from invar import _native

    scales, of_one = (_native.kv_head_bytes(kv_format, dim) for dim in (0, 1))
    return (scales + (of_one - scales) * head_dim) // _native.PAGE_TOKENS


def per_layer(value: Any, layers: int) -> tuple[int | None, int | None]:
    """The most in a layer, and in all together; from one count for all or an array with each."""
    if not hasattr(value, "tolist"):
        count = counted(value)
        return count, None if count is None else layers * count
    counts = value.tolist()  # a layer without attention has 0
    if not all(count == 0 or counted(count) for count in counts):
        return None, None
    return counted(max(counts, default=0)), counted(sum(counts))


def counted(value: Any) -> int | None:
    """A count in the metadata, or None where it cannot be one: broken files are shown too."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return value if is_count else None


def elements(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= int(extent)
    return count


def plain(value: Any) -> Any:
    """A metadata value in JSON's types; a long list by its beginning and its length."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, Sequence):
        shown = [plain(item) for item in value[:8]]
        return shown if len(value) <= 8 else {"first": shown, "length": len(value)}
    return str(value)


def as_text(report: dict[str, Any], all_tensors: bool) -> str:
    memory, version = report["memory"], report["gguf_version"]
    form = "safetensors" if version is None else f"GGUF version {version}"
    parts = [
        "\n".join(report["files"]),
        f"  {form}, architecture {report['architecture']}, "
        f"{report['parameters'] / 1e6:,.1f} M parameters",
        "\nMetadata",
        table([(key, shortened(value)) for key, value in report["metadata"].items()]),
        "\nFormats",
        table(
            [("format", "tensors", "size"), *(
                (name, str(entry["tensors"]), size_text(entry["bytes"]))
                for name, entry in report["formats"].items()
            )],
            right=(1, 2),
        ),
        "\nMemory",
        table([("weights", size_text(memory["weights_bytes"]))], right=(1,)),
    ]  # fmt: skip
    if memory["kv_bytes_per_request"] is not None:
        per_token = size_text(memory["kv_bytes_per_token"])
        rows = [(f"KV per token in {memory['kv_format']}", per_token)]
        rows += [
            (f"KV of a request of {int(length):,} tokens", size_text(count))
            for length, count in memory["kv_bytes_per_request"].items()
        ]
        parts.append(table(rows, right=(1,)))
    else:
        parts.append("KV per token: unknown, the metadata's layers, heads and sizes do not tell")
    if "plan" in report:
        parts.append(plan_text(report["plan"]))
    if all_tensors:
        listed = [
            (t["name"], "x".join(map(str, t["shape"])), t["format"], size_text(t["bytes"]))
            for t in report["tensors"]
        ]
        parts += ["\nTensors", table(listed, right=(3,))]
    else:
        parts.append(f"\n{len(report['tensors'])} tensors (--tensors lists them)")
    return "\n".join(parts)


def plan_text(plan: dict[str, Any]) -> str:
    def sizes(moved: dict[str, int]) -> list[str]:
        return [size_text(moved[what]) for what in ("weights", "activations", "kv")]

    heads = ("weights", "activations", f"KV of {plan['context']:,}")
    passes: list[tuple[str, ...]] = [("after the pass", "operations", "phases", "a layer", *heads)]
    for p in plan["passes"]:
        counts = (str(p[what]) for what in ("operations", "phases", "layer_phases"))
        passes.append((p["name"], *counts, *sizes(p["bytes"])))
    steps: list[tuple[str, ...]] = [("phase", *heads, "operations")]
    for number, step in enumerate(plan["steps"], 1):
        first, *others = step["operations"]
        steps.append((str(number), *sizes(step["bytes"]), first))
        steps += [("", "", "", "", other) for other in others]
    return "\n".join(
        [
            "\nPlan, and what one token moves that is decoded alone",
            table(passes, right=range(1, 7)),
            f"\nSteps of layer {plan['layer']}",
            table(steps, right=range(4)),
        ]
    )


def shortened(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['length']:,} items: {shortened(value['first'])}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text.replace("\n", "\\n")
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
