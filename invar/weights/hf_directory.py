"""A model in Hugging Face layout: config.json, a tokenizer, and safetensors in one file or shards.

Names of tensors and of configuration keys are the files' own here; `models/hf.py` gives them ours.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from invar.weights.safetensors import (
    SafetensorsError,
    SafetensorsFile,
    StoredTensor,
    read_json,
    shown,
)

logger = logging.getLogger("invar")

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"
SHARD_NAME = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")
GENERATION = "generation_config.json"
TEXT_FILES = (CONFIG, GENERATION, "tokenizer_config.json", "tokenizer.json")
OTHER_TOKENIZERS = (
    *("vocab.json", "added_tokens.json", "special_tokens_map.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model"),
)
"""What may say it where there is no tokenizer.json."""
TEMPLATE = "chat_template.jinja"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
TEXT_LIMIT_BYTES = 256 << 20  # far above any tokenizer.json
NAMES_SHOWN = 5


class HFDirectory:
    """Opening reads the configuration and the headers, and checks that every tensor is there.

    Raises `SafetensorsError` for whatever is wrong with a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, Any] = required_json(path / CONFIG)
        self._files: list[SafetensorsFile] = []
        try:
            self._places = self._open_weights()
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(
            {name: file.tensors[name] for name, file in self._places.items()}
        )

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of a tensor as stored: a flat read-only view of the mapping."""
        return self._places[name].raw(name)

    @property
    def weight_paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self._files)

    @property
    def file_bytes(self) -> int:
        """Of all weight files together."""
        return sum(len(file.buffer) for file in self._files)

    def drop_from_page_cache(self) -> None:
        for file in self._files:
            file.drop_from_page_cache()

    def close(self) -> None:
        """Unmap the files, as soon as no array from `raw` looks into them any more."""
        for file in self._files:
            file.close()

    def _open_weights(self) -> dict[str, SafetensorsFile]:
        """Every tensor's file. Where there is an index it decides, whatever else lies there."""
        index = self.path / INDEX
        if not index.exists():
            file = self._open(single_file(self.path).name)
            return dict.fromkeys(file.tensors, file)
        weight_map = read_weight_map(index)
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing:
            raise SafetensorsError(
                f"{index}: {len(missing)} of {len(names)} shards are missing: {listed(missing)}; "
                "put all of them beside it"
            )
        if SINGLE not in names and (self.path / SINGLE).exists():
            logger.warning("%s lies beside an index that does not name it; not read", SINGLE)
        files = {name: self._open(name) for name in names}
        places = {name: files[shard] for name, shard in weight_map.items()}
        lacking = [name for name, file in places.items() if name not in file.tensors]
        if lacking:
            where = places[lacking[0]].path.name
            raise SafetensorsError(
                f"{where}: {len(lacking)} tensors that {INDEX} promises are missing: "
                f"{listed(lacking)}; download it again"
            )
        for file in files.values():
            unlisted = [name for name in file.tensors if name not in places]
            if unlisted:
                raise SafetensorsError(
                    f"{file.path.name}: holds tensors that {INDEX} does not know: "
                    f"{listed(unlisted)}; index and shards are of different models"
                )
        return places

    def _open(self, name: str) -> SafetensorsFile:
        self._files.append(SafetensorsFile(self.path / name))
        return self._files[-1]


def is_hf_directory(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read_weight_map(index: Path) -> dict[str, str]:
    """name of a tensor → name of its shard, a file of the same directory."""
    weight_map = required_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SafetensorsError(f"{index}: has no weight_map from tensors to shards")
    for tensor, shard in weight_map.items():
        is_name = isinstance(shard, str) and shard.endswith(SUFFIX)
        if not is_name or Path(shard).name != shard:
            raise SafetensorsError(
                f"{index}: the shard of {shown(tensor)} is {shown(shard)}, expected the name of a "
                f"{SUFFIX} file of this directory"
            )
    return weight_map


def single_file(path: Path) -> Path:
    """The weights of a directory without an index."""
    found = sorted(file.name for file in path.iterdir() if file.suffix == SUFFIX)
    shards = [name for name in found if SHARD_NAME.fullmatch(name)]
    if SINGLE in found or (len(found) == 1 and not shards):
        return path / (SINGLE if SINGLE in found else found[0])
    if shards:
        raise SafetensorsError(
            f"{path}: there are shards ({listed(shards)}) but no {INDEX}, which says what belongs "
            "where; download it too"
        )
    if found:
        raise SafetensorsError(
            f"{path}: several weight files ({listed(found)}) and neither {SINGLE} nor {INDEX}"
        )
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise SafetensorsError(
            f"{path}: the weights are pickles ({listed(pickles)}), which could run any code and "
            "are never opened; convert them to safetensors, or use a revision that has them"
        )
    raise SafetensorsError(f"{path}: there are no weights, expected {SINGLE} or {INDEX}")


def text_files(path: Path) -> dict[str, Any]:
    """What a directory says about text, by file name: objects of JSON, texts as strings (that of
    the template in jinja), tokenizer.model as bytes."""
    found: dict[str, Any] = {
        name: required_json(path / name) for name in TEXT_FILES if (path / name).exists()
    }
    if "tokenizer.json" not in found:
        others = {Path(name): path / name for name in OTHER_TOKENIZERS if (path / name).exists()}
        readers = {".json": required_json, ".txt": read_text_file, ".model": read_bytes}
        found |= {name.name: readers[name.suffix](file) for name, file in others.items()}
    if (path / TEMPLATE).exists():
        found[TEMPLATE] = read_text_file(path / TEMPLATE)
    return found


def required_json(path: Path) -> dict[str, Any]:
    return read_json(read_text_file(path).encode(), str(path))


def read_text_file(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise SafetensorsError(f"{path}: is not text in UTF-8") from None


def read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > TEXT_LIMIT_BYTES:
            raise SafetensorsError(f"{path}: larger than {TEXT_LIMIT_BYTES >> 20} MiB; not read")
        data = path.read_bytes()
    except FileNotFoundError:
        raise SafetensorsError(f"{path.name}: there is no file {path}") from None
    except OSError as error:
        raise SafetensorsError(f"{path}: cannot be read: {error.strerror}") from None
    if data.startswith(b"version https://git-lfs"):
        raise SafetensorsError(f"{path}: is a pointer of Git LFS, not the file: `git lfs pull`")
    return data


def listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(shown(name) for name in names[:NAMES_SHOWN]) + more
