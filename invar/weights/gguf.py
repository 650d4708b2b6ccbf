"""GGUF models: metadata and tensors, mapped and lazy, over one file or all shards of a split one.

with GGUFFile("model.gguf") as model:
    layers = model.get_int("llama.block_count")
    weight = model.raw("blk.0.attn_q.weight")  # uint8 [rows, row_bytes], a view of the mapping
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np
import numpy.typing as npt

from invar.weights.formats import FormatError, dequantize
from invar.weights.gguf_metadata import REQUIRED, Metadata, Required, TypedGetters
from invar.weights.gguf_shard import Location, Shard, TensorInfo
from invar.weights.gguf_split import open_shards
from invar.weights.gguf_values import GGUFError

__all__ = ["REQUIRED", "GGUFError", "GGUFFile", "Metadata", "Required", "TensorInfo"]


class GGUFFile(TypedGetters):
    """A model in GGUF, versions 2 and 3, little-endian; a split one opens from any of its shards.

    Opening reads and checks the header and touches no weights. Anything wrong with the file raises
    `GGUFError`.
    """

    quantization = "gguf"  # what the option of that name calls it

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._shards: list[Shard] = open_shards(self.path)
        self._places: dict[str, tuple[Shard, Location]] = {
            name: (shard, location)
            for shard in self._shards
            for name, location in shard.tensors.items()
        }
        self.metadata = Metadata(self._shards[0])
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: location.info for name, (_, location) in self._places.items()}
        )

    @property
    def shard_paths(self) -> tuple[Path, ...]:
        """All files of the model, in order."""
        return tuple(shard.path for shard in self._shards)

    @property
    def version(self) -> int:
        """GGUF version of the (first) file."""
        return self._shards[0].version

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of a tensor as stored: a read-only view, `[rows, row_bytes]` if 2-D, else flat."""
        shard, location = self._place(name)
        info = location.info
        shard.require_whole(f"tensor {name}")
        view = np.frombuffer(shard.buffer, np.uint8, info.nbytes, location.start)
        return view.reshape(info.shape[0], -1) if len(info.shape) == 2 else view

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32 of its shape, to the bit what llama.cpp's reference makes of it."""
        shard, location = self._place(name)
        try:
            return dequantize(self.raw(name), location.info.type, location.info.shape)
        except FormatError as error:
            raise GGUFError(f"{shard.path.name}: tensor {name}: {error}") from None

    def _place(self, name: str) -> tuple[Shard, Location]:
        place = self._places.get(name)
        if place is None:
            raise GGUFError(
                f"{self.path.name}: tensor {name} is missing (the model has {len(self.tensors)})"
            )
        return place

    @property
    def file_bytes(self) -> int:
        """Of all files together."""
        return sum(len(shard.buffer) for shard in self._shards)

    def drop_from_page_cache(self) -> None:
        for shard in self._shards:
            shard.drop_from_page_cache()

    def close(self) -> None:
        """Unmap the files, as soon as no array from `raw` looks into them any more."""
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
