"""`invar inspect`: what is in a model file, and the memory it will take."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from invar.cli.engine_options import chosen_model
from invar.cli.inspect_memory import memory_of, memory_text
from invar.cli.parser import CommandParser, add_kv_format, count, whole
from invar.cli.tables import size_text, table
from invar.config import EngineConfig

if TYPE_CHECKING:
    from invar.engine.model_files import ModelFile

PLAN_CONTEXT = 512  # tokens that attention sees in --plan
LONGEST_VALUE = 100  # characters of a metadata value in the table


def parser() -> CommandParser:
    parser = CommandParser("inspect", "Shows a model's metadata, tensors, formats and memory.")
    parser.model()
    parser.flag("--json", help="for programs")
    parser.flag("--tensors", help="list every tensor")
    parser.flag("--plan", help="steps and bytes a token before and after each pass")
    add_kv_format(parser)
    parser.value("--lengths", metavar="N,N", help="KV memory at these tokens, as 512,4096")
    parser.value("--batches", metavar="N,N", help="and for so many requests (1,8,64)")
    parser.value("--max-model-len", "-c", type=count, help="of an engine: what it takes at start")
    parser.value("--max-num-seqs", type=whole, help="of an engine, too")
    return parser


def execute(args: argparse.Namespace) -> int:
    from invar.engine.model_files import open_model
    from invar.weights import sources

    lengths = wanted("--lengths", args.lengths)
    batches = wanted("--batches", args.batches)
    names = ("kv_cache_dtype", "max_model_len", "max_num_seqs")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    config = EngineConfig.from_args(**given)
    with open_model(sources.resolve(chosen_model(args))) as source:
        report = describe(source, config, lengths, batches)
        if args.plan:
            report["plan"] = plan_of(source, (lengths or (PLAN_CONTEXT,))[0], config.kv_format)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        print(as_text(report, args.tensors))
    return 0


def wanted(flag: str, given: str | None) -> Sequence[int] | None:
    if given is None:
        return None
    try:
        numbers = [int(item) for item in given.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not 1 <= min(numbers) <= max(numbers) < 2**31:
        raise ValueError(f"{flag} {given[:60]}: write numbers from 1 on, as 512,4096")
    return numbers


def describe(
    source: ModelFile,
    config: EngineConfig,
    lengths: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Everything about a file, in JSON's types; memory as an engine of these options takes it."""
    metadata = source.metadata
    formats: dict[str, dict[str, int]] = {}
    for info in source.tensors.values():
        entry = formats.setdefault(info.type.name, {"tensors": 0, "bytes": 0, "elements": 0})
        entry["tensors"] += 1
        entry["bytes"] += info.nbytes
        entry["elements"] += elements(info.shape)
    weights = sum(entry["bytes"] for entry in formats.values())
    return {
        "files": [str(path) for path in source.shard_paths],
        "gguf_version": getattr(source, "version", None),  # None: safetensors
        "architecture": metadata.get("general.architecture"),
        "name": metadata.get("general.name"),
        "parameters": sum(entry["elements"] for entry in formats.values()),
        "quantization": getattr(source, "quantization", None),  # of a checkpoint, by its own name
        "context_length": counted(
            metadata.get(f"{metadata.get('general.architecture')}.context_length")
        ),
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
        "memory": {"weights_bytes": weights, **memory_of(source, config, lengths, batches)},
    }


def plan_of(source: ModelFile, context: int, kv_format: str) -> dict[str, Any]:
    """How a step would run here, attention seeing so many tokens."""
    from invar.backends.cpu.memory import usable_threads
    from invar.backends.cpu.plan_report import report_plan
    from invar.graph.operations import KVFormat
    from invar.graph.passes import with_kv_format
    from invar.models import registry

    graph = with_kv_format(registry.build(source), KVFormat(kv_format))
    return report_plan(graph, source, context, usable_threads()).as_json()


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
    if report["quantization"] is not None:
        form += f" quantised as {report['quantization']}"
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
        memory_text(memory),
    ]  # fmt: skip
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
