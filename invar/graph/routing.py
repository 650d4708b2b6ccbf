"""Routers of mixtures of experts: which experts a token goes to, and with what weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


class Scoring(StrEnum):
    """What a router's logits become."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"  # experts are chosen by their logits


@dataclass(frozen=True)
class Routing:
    """How logits of experts become the ``used`` experts of a token and their weights.

    Experts come from the best ``groups_used`` of ``groups`` equal runs of experts, a run being as
    good as the sum of its ``group_best`` highest scores. Ties go to the lower expert.
    """

    used: int
    scoring: Scoring
    normalise: bool = False  # the weights of a token to a sum of 1
    scale: float = 1.0  # of the weights, after that
    groups: int = 1
    groups_used: int = 1
    group_best: int = 1


def route(logits: Doubles, bias: Doubles | None, routing: Routing) -> Doubles:
    """logits `[tokens, experts]` → experts and weights, `[tokens, 2 * used]`."""
    scores = logits
    if routing.scoring is Scoring.SOFTMAX:
        scores = softmax(logits)
    elif routing.scoring is Scoring.SIGMOID:
        scores = sigmoid(logits)
    selection = scores if bias is None else scores + bias
    if routing.groups_used < routing.groups:
        runs = selection.reshape(len(logits), routing.groups, -1)
        best = -np.sort(-runs, axis=-1)[..., : routing.group_best].sum(axis=-1)
        allowed = np.zeros(runs.shape, np.bool_)
        np.put_along_axis(allowed, highest(best, routing.groups_used)[..., None], True, axis=1)
        selection = np.where(allowed.reshape(selection.shape), selection, -np.inf)
    chosen = highest(selection, routing.used)
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if routing.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights = softmax(weights)
    if routing.normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return np.concatenate([chosen, weights * routing.scale], axis=-1)


def highest(x: Doubles, count: int) -> npt.NDArray[np.int64]:
    """Columns of the highest values of each row, best first, ties to the lower column."""
    return np.argsort(-x, axis=-1, kind="stable")[..., :count]


def softmax(x: Doubles) -> Doubles:
    exponential: Doubles = np.exp(x - x.max(axis=-1, keepdims=True))
    total: Doubles = exponential.sum(axis=-1, keepdims=True)
    return exponential / total


def sigmoid(x: Doubles) -> Doubles:
    exponential: Doubles = np.exp(-x)
    return 1 / (1 + exponential)
