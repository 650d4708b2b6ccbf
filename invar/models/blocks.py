"""What several architectures share. Weights have the names of GGUF tensors."""

from __future__ import annotations

from invar.graph.graph import Activation, GraphBuilder, Value
from invar.models.metadata import ArchitectureKeys, ConfigError

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"


def linear(g: GraphBuilder, x: Value, name: str) -> Value:
    """`name.weight`, with `name.bias` if the model has one."""
    bias = f"{name}.bias"
    return g.linear(x, f"{name}.weight", bias if bias in g.source.tensors else None)


def feed_forward(g: GraphBuilder, x: Value, block: str, activation: Activation) -> Value:
    """The gated unit of arXiv 2002.05202: down(activation(gate(x)) * up(x))."""
    gate = linear(g, x, f"{block}.ffn_gate")
    up = linear(g, x, f"{block}.ffn_up")
    return linear(g, g.gated(gate, up, activation), f"{block}.ffn_down")


def output_logits(g: GraphBuilder, x: Value) -> Value:
    """`output.weight`, or the embedding if the model ties the two."""
    return g.linear(x, OUTPUT if OUTPUT in g.source.tensors else EMBEDDING)


def head_counts(keys: ArchitectureKeys, layers: int) -> tuple[int, int]:
    """Query heads and KV heads of every layer."""
    heads = keys.same_for_all_layers("attention.head_count", layers)
    if heads is None:
        heads = keys.integer("attention.head_count")
    kv_heads = keys.same_for_all_layers("attention.head_count_kv", layers) or heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(
            f"{keys.full('attention.head_count')} is {heads}, which {kv_heads} KV heads "
            "do not divide"
        )
    return heads, kv_heads


def head_size(keys: ArchitectureKeys, hidden: int, heads: int) -> int:
    """Dimensions of a head; keys and values must have the same."""
    default = hidden // heads
    key_length = keys.optional_integer("attention.key_length") or default
    value_length = keys.optional_integer("attention.value_length") or default
    if key_length != value_length:
        raise ConfigError(
            f"{keys.full('attention.key_length')} is {key_length} and value_length "
            f"{value_length}; different sizes are not supported yet"
        )
    return key_length
