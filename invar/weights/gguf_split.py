"""Split models: `name-00001-of-00003.gguf` and its siblings, opened together and checked.

Keys and names as written by
https://github.com/ggml-org/llama.cpp/blob/d5845f951ce9ccbfe040f148d2d80ebb6a5864e9/tools/gguf-split/gguf-split.cpp
The first shard carries the metadata of the model; the others, as a rule, only the `split.` keys.
"""

from __future__ import annotations

import re
from pathlib import Path

from invar.weights.gguf_shard import Shard
from invar.weights.gguf_values import INTEGER_KINDS, GGUFError

SPLIT_NUMBER = "split.no"
SPLIT_COUNT = "split.count"
SPLIT_TENSORS = "split.tensors.count"

SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

NAMES_SHOWN = 5


def shard_paths(path: Path) -> list[Path] | None:
    """All shards that belong with a file of this name, in order; None if it does not look split."""
    match = SHARD_NAME.fullmatch(path.name)
    if match is None:
        return None
    stem, count = match["stem"], match["count"]
    return [
        path.with_name(f"{stem}-{number:05d}-of-{count}.gguf")
        for number in range(1, int(count) + 1)
    ]


def open_shards(path: Path) -> list[Shard]:
    """The file, or all shards of the model that it is a shard of, the first one first."""
    named = Shard(path)
    opened = [named]
    try:
        count = split_value(named, SPLIT_COUNT, default=1)
        paths = shard_paths(path)
        if count <= 1:
            if paths is not None and len(paths) > 1:
                raise GGUFError(
                    f"{path.name}: named as one of {len(paths)} shards, but it has no key "
                    f"{SPLIT_COUNT}; rename it if it is a whole model"
                )
            return opened
        if paths is None or len(paths) != count:
            raise GGUFError(
                f"{path.name}: is one of {count} shards of a model, but is not named so; give all "
                f"shards their names back (…-00001-of-{count:05d}.gguf)"
            )
        check_present(path, paths)
        shards = []
        for shard_path in paths:
            if shard_path == path:
                shards.append(named)
                continue
            shards.append(Shard(shard_path))
            opened.append(shards[-1])
        check_together(shards)
        return shards
    except BaseException:
        for shard in opened:
            shard.close()
        raise


def split_value(shard: Shard, key: str, default: int | None = None) -> int:
    entry = shard.entries.get(key)
    if entry is None and default is not None:
        return default
    if entry is None or entry.kind not in INTEGER_KINDS:
        found = "nothing" if entry is None else entry.describe()
        raise GGUFError(f"{shard.path.name}: key {key}: expected an integer, found {found}")
    value: int = shard.value(key)
    return value


def check_present(path: Path, paths: list[Path]) -> None:
    missing = [shard_path.name for shard_path in paths if not shard_path.is_file()]
    if missing:
        shown = ", ".join(missing[:NAMES_SHOWN])
        more = f" and {len(missing) - NAMES_SHOWN} more" if len(missing) > NAMES_SHOWN else ""
        raise GGUFError(
            f"{path.name}: {len(missing)} of {len(paths)} shards are missing: {shown}{more}; put "
            "all of them into one directory"
        )


def check_together(shards: list[Shard]) -> None:
    """All shards are of one model, each in its place, and no tensor is missing or there twice."""
    first = shards[0]
    owners: dict[str, Shard] = {}
    for index, shard in enumerate(shards):
        number = split_value(shard, SPLIT_NUMBER)
        if number != index:
            raise GGUFError(
                f"{shard.path.name}: named as shard {index + 1}, but its key {SPLIT_NUMBER} says "
                f"{number + 1}; the shards were renamed or mixed up"
            )
        check_same_model(first, shard)
        for name in shard.tensors:
            if name in owners:
                raise GGUFError(
                    f"{shard.path.name}: tensor {name} is also in {owners[name].path.name}; this "
                    "shard is from another model"
                )
            owners[name] = shard
    announced = split_value(first, SPLIT_TENSORS)
    if len(owners) != announced:
        held = [f"{shard.path.name} ({len(shard.tensors)})" for shard in shards[:NAMES_SHOWN]]
        raise GGUFError(
            f"{first.path.name}: the model has {announced} tensors, its {len(shards)} shards hold "
            f"{len(owners)}; one of them is from another model, download them again: "
            + ", ".join(held)
        )


def check_same_model(first: Shard, shard: Shard) -> None:
    """A key that both shards carry must have the same bytes in both."""
    for key, entry in shard.entries.items():
        other = first.entries.get(key)
        if key == SPLIT_NUMBER or other is None:
            continue
        ours = shard.buffer[entry.start : entry.end]
        theirs = first.buffer[other.start : other.end]
        if entry.describe() != other.describe() or ours != theirs:
            raise GGUFError(
                f"{shard.path.name}: key {key} differs from {first.path.name}; this shard is from "
                "another model"
            )
