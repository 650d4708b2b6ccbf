"""Routers: who is chosen, with what weights, by small examples done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from models.memory_source import MemorySource

from invar.graph.builder import GraphBuilder
from invar.graph.graph import GraphError
from invar.graph.routing import Routing, Scoring, route

LOGITS = np.log([[1.0, 4.0, 2.0, 4.0, 3.0, 2.0]])  # as probabilities, sixteenths


def routed(routing: Routing, bias: list[float] | None = None) -> tuple[list[int], list[float]]:
    found = route(LOGITS, None if bias is None else np.array(bias), routing)[0]
    return found[: routing.used].astype(int).tolist(), found[routing.used :].tolist()


def test_softmax_over_all() -> None:
    chosen, weights = routed(Routing(3, Scoring.SOFTMAX))
    assert chosen == [1, 3, 4]  # of two that are equal the lower one first
    assert weights == pytest.approx([4 / 16, 4 / 16, 3 / 16])


def test_normalised_and_scaled() -> None:
    _, weights = routed(Routing(3, Scoring.SOFTMAX, normalise=True, scale=2.5))
    assert weights == pytest.approx([2.5 * 4 / 11, 2.5 * 4 / 11, 2.5 * 3 / 11])


def test_softmax_of_the_chosen() -> None:
    _, weights = routed(Routing(3, Scoring.SOFTMAX_OF_CHOSEN))
    assert weights == pytest.approx([4 / 11, 4 / 11, 3 / 11])


def test_sigmoid_and_a_bias_for_the_choice_alone() -> None:
    chosen, weights = routed(Routing(2, Scoring.SIGMOID), [1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert chosen == [0, 1]
    assert weights == pytest.approx([1 / 2, 4 / 5])


@pytest.mark.parametrize(
    ("best", "chosen"),
    [
        (1, [1, 3]),  # the groups (0, 1) and (2, 3) have the highest single scores
        (2, [3, 2]),  # (2, 3) has 6 in all, (0, 1) and (4, 5) have 5: the earlier comes second
    ],
)
def test_groups(best: int, chosen: list[int]) -> None:
    routing = Routing(2, Scoring.SOFTMAX, groups=3, groups_used=2, group_best=best)
    assert routed(routing)[0] == [1, 3]
    assert routed(replace(routing, groups_used=1))[0] == ([1, 0] if best == 1 else chosen)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(7, Scoring.SOFTMAX), "7 experts are used of 6"),
        (Routing(3, Scoring.SOFTMAX, groups=3), "3 experts are used of 2"),
        (Routing(1, Scoring.SOFTMAX, groups=4), "of 4 groups of 6 experts"),
        (Routing(1, Scoring.SOFTMAX, groups=3, group_best=3), "the best 3 of groups of 2"),
    ],
)
def test_numbers_that_do_not_fit(routing: Routing, message: str) -> None:
    values: dict[str, Any] = {"in": np.zeros((9, 4)), "gate": np.zeros((6, 4))}
    g = GraphBuilder(MemorySource({}, {name: v.astype(np.float32) for name, v in values.items()}))
    with pytest.raises(GraphError, match=message):
        g.route(g.linear(g.embed("in"), "gate"), routing)
