"""Types of the native module; native/bindings checks what stands here at run time."""

from collections.abc import Sequence
from mmap import mmap
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from invar.backends.cpu.layout import PackedWeight
from invar.backends.runner import Batch, StepResult

NUMERIC_VERSION: int
PAGE_TOKENS: int
PANEL_COLUMNS: int
MAX_TOP_LOGPROBS: int
HEAD_ROWS: int
QUERY_CHUNK: int

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

class CpuInfo(TypedDict):
    isa: str
    available_isas: list[str]
    usable_cores: int
    affinity_cpus: int

def cpu_info() -> CpuInfo: ...
def int8_peak_gops(threads: int, seconds: float = 0.3) -> float: ...
def bf16_peak_gflops(threads: int, seconds: float = 0.3) -> float: ...
def fp32_peak_gflops(threads: int, seconds: float = 0.3) -> float: ...
def read_rate_gbs(memory: Memory, threads: int, seconds: float = 0.5) -> float: ...
def panel_bytes(format: str, k: int) -> int: ...
def act_format_of(format: str) -> str: ...
def act_row_bytes(format: str, k: int) -> int: ...
def skip_strings(buffer: mmap | bytes, start: int, count: int) -> int | None: ...
def decode_strings(buffer: mmap | bytes, start: int, count: int) -> tuple[list[str], int]: ...
def matrix_stride(width: int) -> int: ...
def kv_head_bytes(head_dim: int) -> int: ...
def attention_scratch_bytes(isa: str, group: int, head_dim: int) -> int: ...
def attention_partials(threads: int, max_length: int) -> int: ...
def attention_partial_bytes(rows: int, head_dim: int) -> int: ...
def sampling_scratch_bytes(isa: str, vocab: int) -> int: ...
def linear_scratch_bytes(columns: int) -> int: ...

class Memory:
    def __init__(self, bytes: int) -> None: ...
    @property
    def bytes(self) -> int: ...
    def array(self) -> Bytes: ...

def pack(
    weights: Sequence[PackedWeight],
    raws: Sequence[Bytes],
    memory: Memory,
    threads: int,
    isa: str = "",
) -> None: ...

class Segment:
    def __init__(
        self,
        format: str,
        x: int,
        memory: Memory,
        offset: int,
        unit_stride: int,
        panels_per_unit: int,
        panels: int,
    ) -> None: ...

class HeadTransform:
    def __init__(
        self,
        bias: Floats | None,
        norm: Floats | None,
        eps: float,
        rope_table: int | None,
        rope_style: str,
        rope_pairs: int,
    ) -> None: ...

class Plan:
    def __init__(
        self,
        isa: str,
        memory: Memory,
        scratch_offset: int,
        max_tokens: int,
        max_sequences: int,
        embedding_rows: int,
        vocab: int,
        threads: int,
        scratch_bytes: int,
        sampling_scratch_bytes: int,
        partials: int,
        partial_bytes: int,
    ) -> None: ...
    def matrix(self, offset: int, width: int, rows: int) -> int: ...
    def activations(self, offset: int, format: str, k: int, rows: int) -> int: ...
    def cache_group(
        self,
        memory: Memory,
        slab_bytes: int,
        page_bytes: int,
        pages_per_slab: int,
        slabs: int,
        kv_heads: int,
        head_dim: int,
        window: int,
    ) -> int: ...
    # Steps are added by name (backends/cpu/emit.py); the native side checks their arguments.
    def begin_rows(self) -> None: ...
    def begin_linear(self) -> None: ...
    def begin_head(self) -> None: ...
    def finish(self) -> None: ...
    def run(self, batch: Batch, result: StepResult) -> None: ...
    def clear_pages(self, group: int, page_ids: npt.NDArray[np.int32]) -> None: ...
    def copy_pages(
        self, group: int, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]
    ) -> None: ...
    def read_matrix(self, matrix: int, rows: int) -> Floats: ...
    def set_profile(self, on: bool) -> None: ...
    def profile(self) -> list[tuple[str, int, int]]: ...  # per phase: kind, calls, nanoseconds
    @property
    def progress(self) -> int: ...
    @property
    def isa(self) -> str: ...

class LinearRates:
    """One core's rates of the linear kernels of a weight format; see bench_bindings.cpp."""

    COLUMNS: int
    MAX_ROWS: int

    def __init__(self, format: str, isa: str = "") -> None: ...
    def gemm_gops(self, rows: int, seconds: float) -> float: ...
    def stream_gbs(self, seconds: float) -> float: ...
    def quantize_gbs(self, seconds: float) -> float: ...
    def pack_gbs(self, seconds: float) -> float: ...

class kernels:
    @staticmethod
    def dequantize_row(format: str, row: Bytes, k: int, isa: str = "") -> Floats: ...
    @staticmethod
    def quantize(format: str, x: Floats, isa: str = "") -> Bytes: ...
    @staticmethod
    def gemm(format: str, raw: Bytes, x: Floats, isa: str = "") -> Floats: ...
    @staticmethod
    def rms_norm(x: Floats, weight: Floats, eps: float, isa: str = "") -> Floats: ...
    @staticmethod
    def gated(activation: str, gate: Floats, up: Floats, isa: str = "") -> Floats: ...
    @staticmethod
    def rope(
        head: Floats,
        inv_freq: npt.NDArray[np.float64],
        position: int,
        magnitude: float = 1.0,
        style: str = "half",
        isa: str = "",
    ) -> Floats: ...
    @staticmethod
    def attention(
        q: Floats,
        k: Floats,
        v: Floats,
        window: int = 0,
        scale: float = 1.0,
        soft_cap: float = 0.0,
        isa: str = "",
    ) -> Floats: ...
    @staticmethod
    def sample(logits: Floats, batch: Batch, result: StepResult, isa: str = "") -> None: ...
