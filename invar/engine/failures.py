"""Why a request ended without an answer, and whose fault that is."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from invar.engine.request import EngineOutput, FinishReason
from invar.engine.state import RequestState

NOT_FINITE = "the model gave no usable logits for this request (NaN, or no token is allowed)"
NOTHING_ALLOWED = (
    "no token is allowed here: the request's grammar, allowed_token_ids, bad_words, logit_bias and "
    "min_tokens have none in common"
)

logger = logging.getLogger("invar.engine")


@dataclass(frozen=True)
class Failure:
    reason: str
    refused: bool = False  # the request's own fault

    def of(self, state: RequestState) -> EngineOutput:
        return EngineOutput(
            state.request.id,
            [],
            finish_reason=FinishReason.ERROR,
            error=self.reason,
            refused=self.refused,
        )


def of_guide(state: RequestState) -> Failure | None:
    """What went wrong with a request's grammar, if anything did."""
    guide = state.guide
    if guide is None or guide.error is None:
        return None
    return Failure(f"structured_outputs: {guide.error}", refused=not guide.is_broken)


def of_row(state: RequestState) -> Failure:
    """Why a row of logits that are not finite, or none of which is allowed, drew nothing."""
    if failure := of_guide(state):
        return failure
    constraints = state.constraints
    if constraints is not None:
        mask = constraints.mask if state.guide is None else state.guide.mask
        if mask is not None and constraints.allow_nothing(mask, state.output_token_ids):
            return Failure(NOTHING_ALLOWED, refused=True)
    return Failure(NOT_FINITE if state.fault is None else f"{NOT_FINITE}: {state.fault}")


def note_fault(state: RequestState, fault: str) -> None:
    """Keeps the first one. A bad value may never reach the logits: it alone fails nobody."""
    if state.fault is None:
        state.fault = fault
        logger.warning("request %s: %s", state.request.id, fault)
