"""A quantised checkpoint presented with one tensor per weight, whatever several it stores."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from invar.weights import quantized_layouts as layouts
from invar.weights.formats import FormatError, QuantType, dequantize
from invar.weights.quantization_settings import QuantizationSettings
from invar.weights.row_formats import FP8_K, NVFP4_GROUP
from invar.weights.safetensors import SafetensorsError, StoredTensor, shown

logger = logging.getLogger("invar")

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Points = npt.NDArray[np.int32] | None
Order = npt.NDArray[np.int32] | None

GPTQ_FORMATS = ("gptq", "gptq_v2")
PLAIN = {"F32": QuantType.F32, "F16": QuantType.F16, "BF16": QuantType.BF16}
# What a static scheme rounds activations and KV with. Activations are rounded by token or not at
# all here, which is finer, and K and V as `--kv-cache-dtype` says.
NOT_USED = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".input_scale_ub",
    ".azp_adj",
    ".output_scale",
    ".kv_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".k_zero_point",
    ".v_zero_point",
)


class Directory(Protocol):
    """`HFDirectory`, or what is presented over it."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def raw(self, name: str) -> Bytes: ...


@dataclass(frozen=True)
class Made:
    """A weight, the stored tensors it is made of, and how."""

    tensor: StoredTensor  # its dtype is the name of a `QuantType`
    parts: tuple[str, ...]
    rows: Callable[[], Bytes]
    order: Order = None  # the model's column that each of its own is; None: the same


class QuantizedDirectory:
    """Raises `SafetensorsError` where parts are missing or do not fit together."""

    def __init__(self, directory: Directory, settings: QuantizationSettings) -> None:
        self.directory = directory
        self.settings = settings
        self.method, self._where = settings.method, settings.where
        self._rounded = False
        self._made = self._present()
        taken = {part for made in self._made.values() for part in made.parts}
        unused = [name for name in directory.tensors if name.endswith(NOT_USED)]
        if unused:
            logger.warning(
                "%d stored scales of activations and K and V are not used (%s …): activations are "
                "rounded by token or not at all",
                len(unused),
                unused[0],
            )
        rest = {
            name: tensor
            for name, tensor in directory.tensors.items()
            if name not in taken and name not in unused
        }
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(
            rest | {name: made.tensor for name, made in self._made.items()}
        )

    def raw(self, name: str) -> Bytes:
        """Bytes of a tensor, flat; those of quantised weights are made anew at every call."""
        made = self._made.get(name)
        if made is None:
            return self.directory.raw(name)
        try:
            return made.rows().reshape(-1)
        except FormatError as error:
            raise SafetensorsError(f"{name}: {error}") from None

    def made_from(self, name: str) -> Sequence[Bytes] | None:
        """The stored bytes behind `raw(name)`, if these are made of others."""
        made = self._made.get(name)
        return None if made is None else [self.directory.raw(part) for part in made.parts]

    def column_order(self, name: str) -> Order:
        """The input feature that each column of `raw(name)` belongs to, `[k]`; None: its own."""
        made = self._made.get(name)
        return None if made is None else made.order

    # ------------------------------------------------------------ what is there

    def _present(self) -> dict[str, Made]:
        layouts_of: dict[str, dict[str, Callable[[str], Made | None]]] = {
            "awq": {".qweight": self._awq},
            "gptq": {".qweight": self._gptq},
            "compressed-tensors": {".weight_packed": self._packed, ".weight": self._bytes},
            "fp8": {".weight": self._bytes},
            "mxfp4": {"_blocks": self._mxfp4},
            "nvfp4": {".weight": self._nvfp4},
        }
        present = layouts_of[self.settings.layout]
        found: dict[str, Made] = {}
        for name in self.directory.tensors:
            for suffix, make in present.items():
                if name.endswith(suffix):
                    made = make(name.removesuffix(suffix))
                    if made is not None:
                        found[made.tensor.name] = made
        if not found:
            raise SafetensorsError(
                f"{self._where} says {self.method}, but no weight is stored that way"
            )
        return found

    def _awq(self, stem: str) -> Made:
        names = (f"{stem}.qweight", f"{stem}.qzeros", f"{stem}.scales")
        words, zeros, scales = (self._part(name, stem) for name in names)
        bits = self._bits((4,))
        version = str(self.settings.get("version", "gemm")).lower()
        if version != "gemm":
            raise SafetensorsError(f"{self._where}: version {shown(version)} of AWQ, not gemm")
        k, words_of_n = matrix_shape(words)
        n = words_of_n * 8
        groups = self._groups(stem, k, scales.shape[0])
        self._expect(zeros, (groups, n // 8), "I32")
        self._expect(scales, (groups, n))
        points = layouts.awq_unpacked(self._words(zeros)).T.astype(np.int32)

        def rows() -> Bytes:
            halves = self._halves(self._floats(scales).T, stem)
            return layouts.group_rows(self._words(words), "awq", bits, halves, points)

        return self._made_of(stem, (n, k), layouts.group_kind(bits, points), names, rows)

    def _gptq(self, stem: str) -> Made:
        names = [f"{stem}.qweight", f"{stem}.qzeros", f"{stem}.scales"]
        words, zeros, scales = (self._part(name, stem) for name in names)
        bits = self._bits((4, 8))
        per = 32 // bits
        stored_as = self.settings.get("checkpoint_format", "gptq")
        if stored_as not in GPTQ_FORMATS or self.settings.get("is_marlin_format"):
            raise SafetensorsError(
                f"{self._where}: checkpoint_format {shown(stored_as)} of GPTQ is packed for a "
                f"kernel of its own; supported: {' and '.join(GPTQ_FORMATS)}"
            )
        words_of_k, n = matrix_shape(words)
        k = words_of_k * per
        groups = self._groups(stem, k, scales.shape[0])
        self._expect(zeros, (groups, -(-n // per)), "I32")
        self._expect(scales, (groups, n))
        order = self._order(f"{stem}.g_idx", k, groups, names)
        # The first layout stores zero points less one, so that 16 of 15 can be.
        plus = 0 if stored_as == "gptq_v2" else 1
        stored = layouts.unpacked(self._words(zeros), bits)[:, :n].T.astype(np.int32) + plus
        symmetric = self.settings.get("sym") is True and bool((stored == 1 << (bits - 1)).all())
        points = None if symmetric else stored

        def rows() -> Bytes:
            halves = self._halves(self._floats(scales).T, stem)
            return layouts.group_rows(self._words(words), "gptq", bits, halves, points, order)

        kind = layouts.group_kind(bits, points)
        return self._made_of(stem, (n, k), kind, tuple(names), rows, order=order)

    def _packed(self, stem: str) -> Made:
        packed = self.directory.tensors[f"{stem}.weight_packed"]
        if packed.dtype == "U8":
            return self._nvfp4_of(stem, packed, f"{stem}.weight_global_scale", divides=True)
        names = [f"{stem}.weight_packed", f"{stem}.weight_scale", f"{stem}.weight_shape"]
        words, scales, shape = (self._part(name, stem) for name in names)
        if words.dtype != "I32" or shape.shape != (2,) or shape.dtype not in ("I32", "I64"):
            raise SafetensorsError(
                f"{words.name}: {words.dtype} of shape {words.shape} with a {shape.dtype} shape of "
                f"{shape.shape} is no layout of compressed-tensors that is known (int4 and int8 in "
                "int32)"
            )
        n, k = (int(size) for size in self._integers(shape))
        bits = words.shape[1] * 32 // k if len(words.shape) == 2 and k > 0 else 0
        if bits not in (4, 8) or words.shape != (n, k * bits // 32):
            raise SafetensorsError(
                f"{words.name}: {words.shape} words are no {shown((n, k))} codes of 4 or 8 bits"
            )
        groups = self._groups(stem, k, scales.shape[-1] if len(scales.shape) == 2 else 1)
        self._expect(scales, (n, groups))
        points: Points = None
        if f"{stem}.weight_zero_point" in self.directory.tensors:
            names.append(f"{stem}.weight_zero_point")
            zeros = self._part(names[-1], stem)
            self._expect(zeros, (-(-n // (32 // bits)), groups), "I32")
            columns = np.ascontiguousarray(self._words(zeros).T)
            points = layouts.unpacked(columns, bits)[:, :n].T.astype(np.int32)
        order = self._order(f"{stem}.weight_g_idx", k, groups, names)

        def rows() -> Bytes:
            halves = self._halves(self._floats(scales), stem)
            return layouts.group_rows(self._words(words), "rows", bits, halves, points, order)

        kind = layouts.group_kind(bits, points)
        return self._made_of(stem, (n, k), kind, tuple(names), rows, order=order)

    def _bytes(self, stem: str) -> Made | None:
        """FP8 and int8: a byte for a weight, and scales; None: a plain weight."""
        weight = self.directory.tensors[f"{stem}.weight"]
        if weight.dtype in PLAIN:
            return None
        if weight.dtype not in ("F8_E4M3", "I8"):
            raise SafetensorsError(f"{weight.name}: {weight.dtype} is not supported")
        n, k = matrix_shape(weight)
        inverse = f"{stem}.weight_scale_inv"  # which is no inverse: it multiplies too
        scale_name = inverse if inverse in self.directory.tensors else f"{stem}.weight_scale"
        names: tuple[str, ...] = (weight.name, scale_name)
        scale = self._part(scale_name, stem)
        if f"{stem}.weight_zero_point" in self.directory.tensors:
            point = self.directory.tensors[f"{stem}.weight_zero_point"]
            if self.directory.raw(point.name).any():
                raise SafetensorsError(f"{point.name}: zero points of int8 rows are not supported")
            names = (*names, point.name)

        def codes() -> Bytes:
            return self.directory.raw(weight.name).reshape(n, k)

        if weight.dtype == "I8":
            if math.prod(scale.shape) not in (1, n):
                raise SafetensorsError(
                    f"{scale_name}: shape {scale.shape}, expected one scale or {n}, one a row"
                )

            def int8_rows() -> Bytes:
                scales = np.broadcast_to(self._scales(scale).reshape(-1), (n,))
                return layouts.scaled_rows(codes(), scales)

            return self._made_of(stem, (n, k), QuantType.INT8, names, int8_rows)
        block = self._fp8_block(scale, n, k)

        def fp8_rows() -> Bytes:
            scales = self._scales(scale).reshape(-(-n // block[0]), -(-k // block[1]))
            return layouts.fp8_rows(codes(), scales, *block)

        return self._made_of(stem, (n, k), QuantType.FP8, names, fp8_rows)

    def _fp8_block(self, scale: StoredTensor, n: int, k: int) -> tuple[int, int]:
        """Rows and columns that share a scale: all, a row, or a block of the configuration."""
        if math.prod(scale.shape) == 1:
            return n, k
        if scale.shape in ((n,), (n, 1)):
            return 1, k
        block = self.settings.get("weight_block_size", [FP8_K, FP8_K])
        sizes = isinstance(block, list) and len(block) == 2 and all(type(b) is int for b in block)
        if sizes and min(block) > 0 and block[1] % FP8_K == 0:
            expected = (-(-n // block[0]), -(-k // block[1]))
            if scale.shape == expected:
                return block[0], block[1]
        raise SafetensorsError(
            f"{scale.name}: shape {scale.shape}, expected one scale, {n}, or one for each block of "
            f"{shown(block)} of {(n, k)} (columns of a block: a multiple of {FP8_K})"
        )

    def _mxfp4(self, stem: str) -> Made:
        names = (f"{stem}_blocks", f"{stem}_scales")
        blocks, scales = (self._part(name, stem) for name in names)
        if len(blocks.shape) < 3 or blocks.shape[-1] != 16 or blocks.dtype != "U8":
            raise SafetensorsError(
                f"{blocks.name}: {blocks.dtype} of shape {blocks.shape} is no MXFP4"
            )
        self._expect(scales, blocks.shape[:-1], "U8")
        shape = (*blocks.shape[:-2], blocks.shape[-2] * 32)

        def rows() -> Bytes:
            exponents = self.directory.raw(scales.name).reshape(scales.shape)
            return layouts.mxfp4_rows(
                self.directory.raw(blocks.name).reshape(blocks.shape), exponents
            )

        return self._made_of(stem, shape, QuantType.MXFP4, names, rows, suffix="")

    def _nvfp4(self, stem: str) -> Made | None:
        """As Model Optimizer stores it; None: a plain weight."""
        packed = self.directory.tensors[f"{stem}.weight"]
        if packed.dtype in PLAIN:
            return None
        return self._nvfp4_of(stem, packed, f"{stem}.weight_scale_2", divides=False)

    def _nvfp4_of(self, stem: str, packed: StoredTensor, whole: str, divides: bool) -> Made:
        """whole: the tensor with the scale of all weights, which it multiplies or divides."""
        names = (packed.name, f"{stem}.weight_scale", whole)
        scales, scale = (self._part(name, stem) for name in names[1:])
        n, pairs = matrix_shape(packed)
        k = 2 * pairs
        self._expect(packed, (n, pairs), "U8")
        self._expect(scales, (n, k // NVFP4_GROUP), "F8_E4M3")
        if math.prod(scale.shape) != 1:
            raise SafetensorsError(f"{whole}: shape {scale.shape}, expected one scale")

        def rows() -> Bytes:
            value = self._scales(scale).reshape(-1)[0]
            if not value > 0:
                raise SafetensorsError(f"{whole}: {value} is no scale")
            return layouts.nvfp4_rows(
                self.directory.raw(packed.name).reshape(n, pairs),
                self.directory.raw(scales.name).reshape(scales.shape),
                np.float32(1) / value if divides else value,
            )

        return self._made_of(stem, (n, k), QuantType.NVFP4_ROWS, names, rows)

    # ------------------------------------------------------------ parts and their checks

    def _made_of(
        self,
        stem: str,
        shape: tuple[int, ...],
        kind: QuantType,
        parts: tuple[str, ...],
        rows: Callable[[], Bytes],
        suffix: str = ".weight",
        order: Order = None,
    ) -> Made:
        try:
            nbytes = kind.tensor_bytes(shape)
        except FormatError as error:
            raise SafetensorsError(f"{stem}{suffix}: {error}") from None
        tensor = StoredTensor(stem + suffix, kind.name, shape, 0, nbytes)
        return Made(tensor, parts, rows, order)

    def _part(self, name: str, stem: str) -> StoredTensor:
        tensor = self.directory.tensors.get(name)
        if tensor is None:
            raise SafetensorsError(
                f"{stem}: {name.removeprefix(stem).lstrip('._')} is missing, which a weight in "
                f"{self.method} layout needs; the checkpoint is incomplete"
            )
        return tensor

    def _expect(
        self, tensor: StoredTensor, shape: tuple[int, ...], dtype: str | None = None
    ) -> None:
        dtypes = (dtype,) if dtype else tuple(PLAIN)
        if tensor.shape != shape or tensor.dtype not in dtypes:
            raise SafetensorsError(
                f"{tensor.name}: {tensor.dtype} of shape {tensor.shape}, expected "
                f"{' or '.join(dtypes)} of shape {shape}"
            )

    def _bits(self, possible: tuple[int, ...]) -> int:
        bits = self.settings.get("bits", self.settings.get("w_bit"))
        if type(bits) is not int or bits not in possible:
            raise SafetensorsError(
                f"{self._where}: {shown(bits)} bits of {self.method}, supported: "
                f"{' and '.join(map(str, possible))}"
            )
        return bits

    def _groups(self, stem: str, k: int, groups: int) -> int:
        if groups < 1 or k % groups or k // groups % layouts.BLOCK:
            raise SafetensorsError(
                f"{stem}: {groups} groups of {k} weights are no multiples of {layouts.BLOCK} each"
            )
        return groups

    def _order(self, name: str, k: int, groups: int, names: list[str]) -> Order:
        """Columns sorted by their group (act-order), by a tensor that is added to names if it is
        there; None: groups follow each other along k."""
        tensor = self.directory.tensors.get(name)
        if tensor is None:
            return None
        names.append(name)
        self._expect(tensor, (k,), "I32")
        group = self._integers(tensor)
        if (group == group[0]).all() and group[0] in (0, -1):
            return None  # what writers leave where nothing was ordered
        sizes = np.bincount(group, minlength=groups) if group.min() >= 0 else group[:0]
        if sizes.shape != (groups,) or (sizes != k // groups).any():
            raise SafetensorsError(
                f"{name}: does not put {k // groups} columns in each of {groups} groups"
            )
        if (np.diff(group) >= 0).all():
            return None
        return np.argsort(group, kind="stable").astype(np.int32)

    def _integers(self, tensor: StoredTensor) -> npt.NDArray[np.int64]:
        values = self.directory.raw(tensor.name).view("<i4" if tensor.dtype == "I32" else "<i8")
        return values.astype(np.int64)

    def _words(self, tensor: StoredTensor) -> npt.NDArray[np.int32]:
        if tensor.dtype != "I32":
            raise SafetensorsError(f"{tensor.name}: {tensor.dtype}, expected I32")
        return self.directory.raw(tensor.name).view("<i4").reshape(tensor.shape)

    def _floats(self, tensor: StoredTensor) -> Floats:
        if tensor.dtype not in PLAIN:
            raise SafetensorsError(f"{tensor.name}: {tensor.dtype}, expected {', '.join(PLAIN)}")
        return dequantize(self.directory.raw(tensor.name), PLAIN[tensor.dtype], tensor.shape)

    def _scales(self, tensor: StoredTensor) -> Floats:
        scales = self._floats(tensor)
        if not np.isfinite(scales).all():
            raise SafetensorsError(f"{tensor.name}: NaN or infinity among the scales")
        return scales

    def _halves(self, scales: Floats, stem: str) -> npt.NDArray[np.float16]:
        halves, rounded = layouts.half_scales(scales)
        if rounded and not self._rounded:
            self._rounded = True
            logger.warning("%s: scales that are no fp16 numbers are rounded to such", stem)
        return halves


def matrix_shape(tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise SafetensorsError(f"{tensor.name}: shape {tensor.shape} is no matrix")
    return tensor.shape[0], tensor.shape[1]
