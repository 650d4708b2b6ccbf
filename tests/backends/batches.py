"""Batches for a runner without an engine, and small models in memory in any number format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from invar.backends.cpu.runner import CpuRunner
from invar.backends.runner import PAGE_TOKENS, Batch, SamplingBatch, StepResult
from invar.graph.graph import Graph
from invar.models import registry
from invar.weights.formats import QuantType, dequantize, quantize


@dataclass
class Piece:
    """Rows of one request in a step: ``ids`` at positions ``start …``, in pages ``pages``."""

    ids: Sequence[int]
    start: int
    pages: Sequence[int]
    logit_rows: Sequence[int] = ()  # of the piece; empty: the last one
    feedback: Mapping[int, int] = field(default_factory=dict)  # row → index of a former sample
    settings: Mapping[str, Any] = field(default_factory=dict)  # of SamplingBatch, per row

    @property
    def wanted(self) -> Sequence[int]:
        return self.logit_rows or [len(self.ids) - 1]


DEFAULTS: dict[str, tuple[Any, type]] = {
    "temperature": (0.0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32),
    "seed": (0, np.uint64),
    "choice": (0, np.int32),
    "position": (0, np.int32),
    "repetition_penalty": (1.0, np.float32),
    "frequency_penalty": (0.0, np.float32),
    "presence_penalty": (0.0, np.float32),
    "prompt_len": (0, np.int32),
    "score": (False, np.bool_),
    "score_token": (0, np.int32),
    "top_logprobs": (0, np.int32),
}


def sampling_batch(rows: Sequence[Mapping[str, Any]], vocab: int = 0) -> SamplingBatch:
    """Per row the fields of DEFAULTS and ``history``, ``bias`` (id → value), ``allowed`` ids."""
    arrays = {
        name: np.array([row.get(name, value) for row in rows], dtype)
        for name, (value, dtype) in DEFAULTS.items()
    }
    histories = [np.array(row.get("history", ()), np.int32) for row in rows]
    biases: list[Mapping[int, float]] = [row.get("bias", {}) for row in rows]
    masked = [index for index, row in enumerate(rows) if "allowed" in row]
    masks = np.zeros((len(masked), -(-vocab // 32) + 1), np.uint32)
    masks[:, -1] = 1  # ready
    for line, index in enumerate(masked):
        for token in rows[index]["allowed"]:
            masks[line, token // 32] |= np.uint32(1 << token % 32)
    return SamplingBatch(
        **arrays,
        history=concatenated(histories, np.int32),
        history_start=starts(histories),
        bias_ids=concatenated([list(bias) for bias in biases], np.int32),
        bias_values=concatenated([list(bias.values()) for bias in biases], np.float32),
        bias_start=starts(biases),
        masks=tuple(masks),
        masked_rows=np.array(masked, np.int32),
    )


def concatenated(parts: Sequence[Any], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def starts(parts: Sequence[Any]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *(len(part) for part in parts)]).astype(np.int64)


def make_batch(runner: CpuRunner, pieces: Sequence[Piece]) -> Batch:
    query_start = starts([piece.ids for piece in pieces]).astype(np.int32)
    width = max((len(piece.pages) for piece in pieces), default=1)
    table = np.zeros((len(pieces), width), np.int32)
    for row, piece in zip(table, pieces, strict=True):
        row[: len(piece.pages)] = piece.pages
    positions = concatenated(
        [np.arange(piece.start, piece.start + len(piece.ids)) for piece in pieces], np.int32
    )
    feedback = [
        (first + row, sample)
        for first, piece in zip(query_start, pieces, strict=False)
        for row, sample in piece.feedback.items()
    ]
    rows = [
        (first + row, piece.settings)
        for first, piece in zip(query_start, pieces, strict=False)
        for row in piece.wanted
    ]
    return Batch(
        token_ids=concatenated([piece.ids for piece in pieces], np.int32),
        feedback=np.array(feedback, np.int32).reshape(-1, 2),
        positions=positions[None],
        query_start=query_start,
        kv_len=np.array([piece.start + len(piece.ids) for piece in pieces], np.int32),
        block_tables=tuple(
            table + first_page(runner, group) for group in range(len(runner.info.groups))
        ),
        logit_rows=np.array([row for row, _ in rows], np.int32),
        sampling=sampling_batch([settings for _, settings in rows], runner.info.vocab_size),
    )


def first_page(runner: CpuRunner, group: int) -> np.int32:
    """Groups share the arena: here each has an equal run of slabs for itself."""
    info = runner.info
    slab = info.slabs // len(info.groups) * group
    return np.int32(slab * info.groups[group].pages_per_slab)


def run(runner: CpuRunner, *pieces: Piece) -> StepResult:
    return runner.submit(make_batch(runner, pieces)).result()


def pages_for(tokens: int, first: int = 0) -> list[int]:
    """Pages in an order that is not that of the tokens."""
    count = -(-tokens // PAGE_TOKENS)
    return list(range(first + count - 1, first - 1, -1))


def poison(runner: CpuRunner) -> None:
    """NaN in every page: what is read without having been written shows in the logits."""
    for index, group in enumerate(runner.info.groups):
        pages = runner.info.slabs * group.pages_per_slab
        runner.clear_pages(index, np.arange(pages, dtype=np.int32))


def make_runner(graph: Graph, source: Any, **options: Any) -> CpuRunner:
    settings: dict[str, Any] = {
        "max_tokens_per_step": 192,
        "max_sequences": 16,
        "max_model_len": min(512, graph.max_positions),
        "kv_budget_bytes": 64 << 20,
        "threads": 2,
    }
    return CpuRunner(graph, source, **(settings | options))


# ---------------------------------------------------------------- models in memory


@dataclass
class Tensor:
    shape: tuple[int, ...]
    type: QuantType


class MemorySource:
    """A model of random weights; ``formats`` maps a part of a tensor's name to its format."""

    def __init__(
        self,
        metadata: dict[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        formats: Mapping[str, QuantType],
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.metadata = metadata
        self.tensors: dict[str, Tensor] = {}
        self.bytes: dict[str, npt.NDArray[np.uint8]] = {}
        for name, shape in shapes.items():
            values = rng.standard_normal(shape).astype(np.float32)
            values = values / np.sqrt(shape[-1]) if len(shape) > 1 else 1 + values / 8
            kind = next((kind for part, kind in formats.items() if part in name), QuantType.F32)
            self.tensors[name] = Tensor(shape, kind)
            rows = values.astype(np.float32).reshape(-1, shape[-1])
            self.bytes[name] = np.ascontiguousarray(quantize(rows, kind))

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self.bytes[name]

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        tensor = self.tensors[name]
        return dequantize(self.bytes[name], tensor.type, tensor.shape)


MIXED = {
    "token_embd": QuantType.Q8_0,
    "attn_q.weight": QuantType.Q4_K,
    "attn_k.weight": QuantType.Q5_0,
    "attn_v.weight": QuantType.Q6_K,
    "attn_output": QuantType.Q4_K,
    "ffn_gate": QuantType.Q4_0,
    "ffn_up": QuantType.Q4_1,
    "ffn_down": QuantType.Q6_K,
    "output.weight": QuantType.BF16,
}


MIXED_EXPERTS = {"ffn_gate_inp": QuantType.F32, "ffn_gate": QuantType.Q4_K} | {
    part: kind for part, kind in MIXED.items() if part != "ffn_gate"
}
"""Gate and up read their input in different codes."""


def llama_source(
    formats: Mapping[str, QuantType],
    *,
    hidden: int = 256,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 32,
    feed_forward: int = 512,
    vocab: int = 320,
    layers: int = 2,
    experts: int = 0,
) -> MemorySource:
    """With experts: of each layer, two of which a token uses."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": hidden,
        "llama.block_count": layers,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": head_dim,
        "llama.rope.freq_base": 10000.0,
        "llama.context_length": 512,
        "llama.feed_forward_length": feed_forward,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (vocab, hidden),
    }
    for layer in range(layers):
        block = f"blk.{layer}"
        shapes |= {
            f"{block}.attn_norm.weight": (hidden,),
            f"{block}.attn_q.weight": (heads * head_dim, hidden),
            f"{block}.attn_k.weight": (kv_heads * head_dim, hidden),
            f"{block}.attn_v.weight": (kv_heads * head_dim, hidden),
            f"{block}.attn_output.weight": (hidden, heads * head_dim),
            f"{block}.ffn_norm.weight": (hidden,),
        }
        if experts:
            metadata |= {"llama.expert_count": experts, "llama.expert_used_count": 2}
            shapes[f"{block}.ffn_gate_inp.weight"] = (experts, hidden)
        stack, ending = ((experts,), "_exps.weight") if experts else ((), ".weight")
        shapes |= {
            f"{block}.ffn_gate{ending}": (*stack, feed_forward, hidden),
            f"{block}.ffn_up{ending}": (*stack, feed_forward, hidden),
            f"{block}.ffn_down{ending}": (*stack, hidden, feed_forward),
        }
    return MemorySource(metadata, shapes, formats)


def llama_runner(formats: Mapping[str, QuantType] = MIXED, **options: Any) -> CpuRunner:
    source = llama_source(formats)
    return make_runner(registry.build(source), source, **options)
