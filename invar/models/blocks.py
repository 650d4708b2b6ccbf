"""What several architectures share. Weights have the names of GGUF tensors."""

from __future__ import annotations

from invar.graph.builder import GraphBuilder
from invar.graph.graph import GraphError, WeightSource
from invar.graph.operations import Activation, Value
from invar.models.metadata import ArchitectureKeys, ConfigError

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"


def linear(g: GraphBuilder, x: Value, name: str) -> Value:
    """`name.weight`, with `name.bias` if the model has one."""
    bias = f"{name}.bias"
    return g.linear(x, f"{name}.weight", bias if bias in g.source.tensors else None)


def feed_forward(
    g: GraphBuilder, x: Value, block: str, activation: Activation, suffix: str = ""
) -> Value:
    """The gated unit of arXiv 2002.05202: down(activation(gate(x)) * up(x)).

    suffix `_shexp`: the expert that every token goes through, beside those of a mixture.
    """
    gate = linear(g, x, f"{block}.ffn_gate{suffix}")
    up = linear(g, x, f"{block}.ffn_up{suffix}")
    return linear(g, g.gated(gate, up, activation), f"{block}.ffn_down{suffix}")


def plain_feed_forward(g: GraphBuilder, x: Value, block: str, activation: Activation) -> Value:
    """Without a gate: down(activation(up(x)))."""
    inner = g.activate(linear(g, x, f"{block}.ffn_up"), activation)
    return linear(g, inner, f"{block}.ffn_down")


def activation_of(keys: ArchitectureKeys, usual: Activation) -> Activation:
    """Of the feed-forward; `usual` where the model's files do not say."""
    name = keys.optional_text("feed_forward_activation")
    if name is not None and name not in set(Activation):
        raise ConfigError(
            f"{keys.full('feed_forward_activation')} {name!r} is not known "
            f"(known: {', '.join(Activation)})"
        )
    return usual if name is None else Activation(name)


def layer_norm(g: GraphBuilder, x: Value, name: str, eps: float) -> Value:
    return g.layer_norm(x, f"{name}.weight", f"{name}.bias", eps)


def output_logits(g: GraphBuilder, x: Value) -> Value:
    """`output.weight`, or the embedding if the model ties the two."""
    if OUTPUT not in g.source.tensors:
        return g.linear(x, EMBEDDING)
    rows, embeddings = (matrix_shape(g.source, name)[0] for name in (OUTPUT, EMBEDDING))
    if rows != embeddings:
        raise GraphError(
            f"{OUTPUT} has {rows} rows and {EMBEDDING} {embeddings}; both need one for every "
            "token of the vocabulary"
        )
    return g.linear(x, OUTPUT)


# Sizes are compared with the tensors before tables and layers are made from them: a damaged number
# may be anything up to 2^31, the tensors are no larger than the file.


def matrix_shape(source: WeightSource, weight: str) -> tuple[int, int]:
    """Rows and columns, `[out_features, in_features]`."""
    if weight not in source.tensors:
        raise GraphError(f"{weight}: the model file has no such tensor")
    shape = tuple(source.tensors[weight].shape)
    if len(shape) != 2:
        raise GraphError(f"{weight}: shape {shape}, expected 2 dimensions")
    return shape[0], shape[1]


def layer_count(source: WeightSource, keys: ArchitectureKeys) -> int:
    """`block_count`, of which the file must have the tensors."""
    layers = keys.integer("block_count")
    found = {name.split(".")[1] for name in source.tensors if name.startswith("blk.")}
    if layers != len(found):
        raise ConfigError(
            f"{keys.full('block_count')} is {layers}, but the file has tensors of {len(found)} "
            "blocks (blk.*)"
        )
    return layers


def hidden_size(source: WeightSource, keys: ArchitectureKeys) -> int:
    """`embedding_length`, which the embedding must have as columns."""
    hidden = keys.integer("embedding_length")
    _, columns = matrix_shape(source, EMBEDDING)
    if hidden != columns:
        raise ConfigError(
            f"{keys.full('embedding_length')} is {hidden}, but {EMBEDDING} has {columns} columns"
        )
    return hidden


def head_counts(keys: ArchitectureKeys, layers: int) -> tuple[int, int]:
    """Query heads and KV heads of every layer."""
    heads = keys.same_for_all_layers("attention.head_count", layers)
    if heads is None:
        heads = keys.integer("attention.head_count")
    kv_heads = keys.same_for_all_layers("attention.head_count_kv", layers) or heads
    if heads % kv_heads:
        raise ConfigError(
            f"{keys.full('attention.head_count')} is {heads}, which {kv_heads} KV heads "
            "do not divide"
        )
    return heads, kv_heads


def head_size(
    source: WeightSource, keys: ArchitectureKeys, hidden: int, heads: int, kv_heads: int
) -> int:
    """Dimensions of a head; keys and values must have the same, and the weights rows for them."""
    default = hidden // heads
    key_length = keys.optional_integer("attention.key_length") or default
    value_length = keys.optional_integer("attention.value_length") or default
    if key_length != value_length:
        raise ConfigError(
            f"{keys.full('attention.key_length')} is {key_length} and value_length "
            f"{value_length}; different sizes are not supported yet"
        )
    for weight, count, name in (
        ("blk.0.attn_q.weight", heads, "head_count"),
        ("blk.0.attn_k.weight", kv_heads, "head_count_kv"),
    ):
        rows, _ = matrix_shape(source, weight)
        if rows != count * key_length:
            raise ConfigError(
                f"{weight} has {rows} rows, which are not {count} heads "
                f"({keys.full(f'attention.{name}')}) of {key_length} dimensions "
                f"({keys.full('attention.key_length')}, by default embedding_length / head_count)"
            )
    return key_length
