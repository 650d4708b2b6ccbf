"""Bias, bans and masks as arrays."""

from __future__ import annotations

import numpy as np

from engine.helpers import request
from invar.engine.constraints import Constraints


def bias_of(constraints: Constraints, *output: int) -> list[tuple[int, float]]:
    ids, values = constraints.bias(np.array(output, np.int32))
    assert (ids.dtype, values.dtype) == (np.int32, np.float32)
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def test_nothing_is_nothing() -> None:
    constraints = Constraints.of(request("r", 3), 97)
    assert bias_of(constraints, 1, 2) == []
    assert constraints.mask is None


def test_a_ban_of_one_id_stands_and_takes_the_place_of_its_bias() -> None:
    one = request("r", 3, bias=((5, 2.0), (6, -1.5)), bad_sequences=((5,), (9,)))
    expected = [(5, -np.inf), (6, -1.5), (9, -np.inf)]
    assert bias_of(Constraints.of(one, 97)) == expected
    assert bias_of(Constraints.of(one, 97), 5, 6) == expected


def test_a_longer_ban_counts_after_its_beginning_alone() -> None:
    one = request("r", 3, bias=((7, 4.0),), bad_sequences=((5, 6, 7), (6, 8)))
    constraints = Constraints.of(one, 97)
    assert bias_of(constraints) == [(7, 4.0)]
    assert bias_of(constraints, 6) == [(7, 4.0), (8, -np.inf)]
    assert bias_of(constraints, 5, 6) == [(7, 4.0), (7, -np.inf), (8, -np.inf)]
    assert bias_of(constraints, 5, 6, 1) == [(7, 4.0)]


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    one = request("r", 3, stop_token_ids=frozenset({4, 2}), min_tokens=2, bad_sequences=((1, 3),))
    constraints = Constraints.of(one, 97)
    assert bias_of(constraints, 1) == [(2, -np.inf), (4, -np.inf), (3, -np.inf)]
    assert bias_of(constraints, 0, 0) == []


def test_a_mask_has_a_bit_for_every_id() -> None:
    for vocab, words in ((96, 3), (97, 4)):
        mask = Constraints.of(request("r", 3, allowed_token_ids=(0, 31, 32, 95)), vocab).mask
        assert mask is not None
        assert mask.dtype == np.uint32
        assert mask.tolist() == [*[0x80000001, 1, 0x80000000, 0][:words], 1]  # it is ready
