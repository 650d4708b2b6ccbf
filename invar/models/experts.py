"""Feed-forwards of mixtures of experts: a router, and stacks with the matrices of all experts."""

from __future__ import annotations

from invar.graph.builder import GraphBuilder
from invar.graph.graph import GraphError
from invar.graph.operations import Activation, ExpertWeight, Value
from invar.graph.routing import Routing
from invar.models.blocks import linear
from invar.models.metadata import ArchitectureKeys, ConfigError


def expert_counts(keys: ArchitectureKeys) -> tuple[int, int]:
    """Experts of a layer, and how many of them a token uses."""
    count, used = keys.integer("expert_count"), keys.integer("expert_used_count")
    if used > count:
        raise ConfigError(
            f"{keys.full('expert_used_count')} is {used}, more than the {count} experts of "
            f"{keys.full('expert_count')}"
        )
    return count, used


def mixture(
    g: GraphBuilder,
    x: Value,
    block: str,
    count: int,
    routing: Routing,
    activation: Activation,
    weighted_input: bool = False,
) -> Value:
    """The experts of a block, weighted and added; a bias of the router or of experts if it has.

    weighted_input: of the one expert of a token, the weight is on what goes in.
    """
    logits = linear(g, x, f"{block}.ffn_gate_inp")
    if logits.width != count:
        raise GraphError(
            f"{block}.ffn_gate_inp.weight has {logits.width} rows, expected one for each of "
            f"{count} experts"
        )
    bias = f"{block}.exp_probs_b.bias"
    routes = g.route(logits, routing, bias if bias in g.source.tensors else None)
    gate, up, down = (expert_weight(g, f"{block}.ffn_{part}_exps") for part in PARTS)
    if weighted_input:
        x = g.scale_rows(x, g.columns(routes, 1, 1))
    return g.experts(
        x,
        routes,
        gate=gate,
        up=up,
        down=down,
        activation=activation,
        weighted=not weighted_input,
    )


PARTS = ("gate", "up", "down")


def expert_weight(g: GraphBuilder, name: str) -> ExpertWeight:
    bias = f"{name}.bias"
    return ExpertWeight(f"{name}.weight", bias if bias in g.source.tensors else None)
