"""A Hugging Face directory as a `ModelSource`: tensors and metadata under the names of GGUF."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from invar.models.hf import Config, HFFamily, Key
from invar.models.metadata import ArchitectureKeys, ConfigError, brief
from invar.models.placed import Placed
from invar.models.text_side import name_without_sight, sees, text_side
from invar.weights.formats import QuantType, dequantize
from invar.weights.gguf_shard import TensorInfo
from invar.weights.hf_directory import CONFIG, HFDirectory
from invar.weights.quantization_settings import quantization_settings
from invar.weights.quantized_directory import QuantizedDirectory
from invar.weights.safetensors import SafetensorsError, StoredTensor

logger = logging.getLogger("invar")

OUTPUT = "output.weight"
TYPES = {"F32": QuantType.F32, "F16": QuantType.F16, "BF16": QuantType.BF16} | {
    kind.name: kind
    for kind in (
        QuantType.Q4_0,
        QuantType.Q8_0,
        QuantType.INT4_ZP,
        QuantType.INT8_ZP,
        QuantType.INT8,
        QuantType.FP8,
        QuantType.MXFP4,
        QuantType.NVFP4_ROWS,
    )
}
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class HFMetadata(dict[str, Any]):
    """Metadata under GGUF's keys that remembers what each is called in config.json."""

    def __init__(self, family: HFFamily, config: Config) -> None:
        super().__init__({"general.architecture": family.architecture})
        self.written_as: dict[str, str] = {}
        for name, key in family.keys.items():
            full = f"{family.architecture}.{name}"
            self.written_as[full] = f"{CONFIG}: {first(key, config)}"
            value = key(config) if callable(key) else config.get(first(key, config))
            if value is not None:
                self[full] = value


def first(key: Key, config: Config) -> str:
    """What a key is called in this config.json."""
    if callable(key):
        return key.__name__
    names = (key,) if isinstance(key, str) else key
    return next((name for name in names if config.get(name) is not None), names[0])


@dataclass(frozen=True)
class _Presented:
    """A tensor of ours: what is stored for it, and what is done to that."""

    info: TensorInfo
    stored: tuple[str, ...]  # more than one: stacked
    placed: Placed


@dataclass
class _Stack:
    placed: Placed
    stored: dict[int, StoredTensor] = field(default_factory=dict)  # number in the stack → tensor


class HFSource:
    """Weights and metadata of a directory. Raises `SafetensorsError` and `ConfigError`."""

    def __init__(self, path: str | Path, family_of: Callable[[Config], HFFamily]) -> None:
        self.path = Path(path)
        self.directory = HFDirectory(self.path)
        try:
            self.family = family_of(self.directory.config)
            self.config: Config = {**self.family.defaults, **text_side(self.directory.config)}
            self.stored = self._stored()
            self.metadata = HFMetadata(self.family, self.config)
            self._keys = ArchitectureKeys(self.metadata, self.family.architecture)
            self._presented = self._present()
        except BaseException:
            self.close()
            raise
        if sees(self.directory.config):
            logger.warning(
                "%s: images are not supported yet; of this model that sees too, the language "
                "model is run",
                self.path.name,
            )
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: presented.info for name, presented in self._presented.items()}
        )

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of a tensor: `[rows, row_bytes]` if 2-D, else flat. A view where nothing but the
        name changes, else a copy."""
        presented = self._presented[name]
        info, placed = presented.info, presented.placed
        parts = [self._part(stored, placed) for stored in presented.stored]
        whole = (
            parts[0] if len(parts) == 1 else np.concatenate([part.reshape(-1) for part in parts])
        )
        return whole.reshape(info.shape[0], -1) if len(info.shape) == 2 else whole.reshape(-1)

    def made_from(self, name: str) -> Sequence[npt.NDArray[np.uint8]] | None:
        """The stored bytes behind `raw(name)`, if that makes others of them at every call."""
        presented = self._presented[name]
        made = [self._made_from(part) for part in presented.stored]
        if len(made) == 1 and made[0] is None:
            stored = self.stored.tensors[presented.stored[0]]
            if not presented.placed.copies(self._keys, TYPES[stored.dtype], stored.shape):
                return None
        parts = zip(presented.stored, made, strict=True)
        return [raw for part, raws in parts for raw in raws or (self.stored.raw(part),)]

    def column_order(self, name: str) -> npt.NDArray[np.int32] | None:
        """The input feature that each column of a tensor belongs to; None: its own."""
        stored = self.stored
        if name not in self._presented or not isinstance(stored, QuantizedDirectory):
            return None
        return stored.column_order(self._presented[name].stored[0])

    def _made_from(self, part: str) -> Sequence[npt.NDArray[np.uint8]] | None:
        stored = self.stored
        return stored.made_from(part) if isinstance(stored, QuantizedDirectory) else None

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32 of its shape."""
        info = self._presented[name].info
        return dequantize(self.raw(name), info.type, info.shape)

    def _stored(self) -> HFDirectory | QuantizedDirectory:
        """What is stored, with one tensor for every weight."""
        settings = quantization_settings(self.path, self.config, self.directory.tensors)
        if settings is None:
            return self.directory
        return QuantizedDirectory(self.directory, settings)

    @property
    def quantization(self) -> str | None:
        """What the checkpoint calls the way in which its weights are quantised."""
        stored = self.stored
        return stored.method if isinstance(stored, QuantizedDirectory) else None

    def _part(self, name: str, placed: Placed) -> npt.NDArray[np.uint8]:
        """`[rows, row_bytes]` of one stored tensor, as it is presented."""
        stored = self.stored.tensors[name]
        return placed.take(self._keys, self.stored.raw(name), TYPES[stored.dtype], stored.shape)

    def _present(self) -> dict[str, _Presented]:
        stacks: dict[str, _Stack] = {}
        for name, stored in self.stored.tensors.items():
            known = self._known(name)
            if known is None or NUMBER.sub("{}", known) in self.family.left_out:
                continue
            for ours, number, placed in self._places(known):
                if ours == OUTPUT and self.config.get("tie_word_embeddings") is True:
                    continue  # the reference ties whatever is stored
                stack = stacks.setdefault(ours, _Stack(placed))
                if number in stack.stored:
                    raise SafetensorsError(
                        f"{name} and {stack.stored[number].name} are both {ours}"
                    )
                stack.stored[number] = stored
        if OUTPUT not in stacks and self.config.get("tie_word_embeddings") is False:
            raise SafetensorsError(
                f"{self.path}: the output matrix (lm_head.weight) is missing, and {CONFIG} says "
                "that it is not tied to the embedding"
            )
        return {ours: self._presented_as(ours, stack) for ours, stack in stacks.items()}

    def _known(self, name: str) -> str | None:
        """The name by which the family knows a stored weight; None: of a part that is not run."""
        known = name_without_sight(name) if sees(self.directory.config) else name
        renamed = self.family.renamed
        return known if known is None or renamed is None else renamed(self.config, known)

    def _places(self, name: str) -> Iterator[tuple[str, int, Placed]]:
        """Of every weight that a tensor holds: our name, its number in a stack, what is done to it.

        A weight without a place keeps its name: the registry refuses it, naming a near one.
        """
        pattern, numbers = NUMBER.sub("{}", name), NUMBER.findall(name)
        stem, _, kind = pattern.rpartition(".")
        entry = self.family.names.get(pattern)
        ending = ""
        if entry is None:
            entry, ending = self.family.names.get(stem), f".{kind}"
        if entry is None:
            yield name, 0, Placed(name)
            return
        for weight in entry if isinstance(entry, tuple) else (entry,):
            placed = Placed(weight) if isinstance(weight, str) else weight
            inside = [int(number) for number in numbers[placed.name.count("{}") :]]
            yield placed.name.format(*numbers) + ending, inside[0] if inside else 0, placed

    def _presented_as(self, ours: str, stack: _Stack) -> _Presented:
        if sorted(stack.stored) != list(range(len(stack.stored))):
            known = ", ".join(map(str, sorted(stack.stored)[:8]))
            raise SafetensorsError(f"{ours}: parts are missing, there are {known}, …")
        parts = [stack.stored[number] for number in range(len(stack.stored))]
        alike = {(part.dtype, part.shape) for part in parts}
        if len(alike) > 1:
            raise SafetensorsError(f"{ours}: its parts differ in shape or type: {brief(alike)}")
        dtype, shape = alike.pop()
        if 0 in shape:
            raise SafetensorsError(f"tensor {parts[0].name}: shape {shape} holds nothing")
        if dtype not in TYPES:
            raise SafetensorsError(
                f"tensor {parts[0].name}: dtype {dtype} is not supported "
                f"(supported: {', '.join(TYPES)})"
            )
        placed = stack.placed
        try:
            shape = placed.shape(self._keys, TYPES[dtype], shape)
        except ConfigError as error:
            raise ConfigError(f"tensor {parts[0].name}: {error}") from None
        kind = placed.kind(TYPES[dtype])
        if len(parts) > 1:
            self._expect_in_order(parts)
            shape = (len(parts), *shape)
        info = TensorInfo(ours, shape, kind, kind.tensor_bytes(shape))
        return _Presented(info, tuple(part.name for part in parts), placed)

    def _expect_in_order(self, parts: Sequence[StoredTensor]) -> None:
        """Parts of a stack have the columns of one input: that of each expert is the same."""
        stored = self.stored
        if not isinstance(stored, QuantizedDirectory):
            return
        for part in parts:
            if stored.column_order(part.name) is not None:
                raise SafetensorsError(
                    f"{part.name}: experts with columns in the order of their activations "
                    "(act-order) are not supported; use a checkpoint made without desc_act"
                )

    @property
    def shard_paths(self) -> tuple[Path, ...]:
        """All files that the answers depend on: the configuration and the weights."""
        return (self.path / CONFIG, *self.directory.weight_paths)

    @property
    def file_bytes(self) -> int:
        return self.directory.file_bytes

    def drop_from_page_cache(self) -> None:
        self.directory.drop_from_page_cache()

    def close(self) -> None:
        """Unmap the files, as soon as no array from `raw` looks into them any more."""
        self.directory.close()

    def __enter__(self) -> HFSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
