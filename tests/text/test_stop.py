"""Stop strings over text in chunks of any size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invar.text.stop import StopStrings


def run(stops: list[str], chunks: list[str], include: bool = False) -> tuple[list[str], str | None]:
    machine = StopStrings(stops, include)
    sent = []
    for chunk in chunks:
        emitted, matched = machine.push(chunk)
        sent.append(emitted)
        if matched is not None:
            return sent, matched
    sent.append(machine.flush())
    return sent, None


def test_b15_stop_string_split_over_tokens() -> None:
    sent, matched = run(["END_HERE"], ["ab", "EN", "D_", "HERE", "zz"])
    assert (sent, matched) == (["ab", "", "", ""], "END_HERE")


def test_b15_a_failed_match_is_released_unchanged() -> None:
    sent, matched = run(["END_HERE"], ["ab", "END_H", "OPE"])
    assert (sent, matched) == (["ab", "", "END_HOP", "E"], None)


def test_b15_of_two_stops_the_one_completed_first_wins() -> None:
    assert run(["END", "END_HERE"], ["ab", "EN", "D_HERE"]) == (["ab", "", ""], "END")
    assert run(["bc", "abcd"], ["xabcd"]) == (["xa"], "bc")
    # Ending together, the longer one began earlier and takes more away.
    assert run(["c", "abc"], ["xabc"]) == (["x"], "abc")


def test_b15_held_text_is_released_at_the_end() -> None:
    assert run(["END_HERE"], ["ab", "END_"]) == (["ab", "", "END_"], None)


def test_b15_a_match_may_begin_inside_a_failed_one() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_b16_stop_inside_a_token() -> None:
    assert run(["x"], ["axb"]) == (["a"], "x")
    assert run(["x"], ["axb"], include=True) == (["ax"], "x")


def test_text_after_a_match_is_dropped() -> None:
    machine = StopStrings(["x"])
    assert machine.push("ax") == ("a", "x")
    assert machine.push("more") == ("", "x")
    assert machine.flush() == ""
    assert machine.matched == "x"


def test_stops_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="empty string"):
        StopStrings(["a", ""])
    with pytest.raises(ValueError, match="expected a list"):
        StopStrings("abc")


def cut_by_definition(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Reads on character by character until a stop string stands at the end."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    chunks=st.lists(st.text("abc", max_size=6), max_size=8),
    include=st.booleans(),
)
def test_any_chunking_gives_the_same_text(
    stops: list[str], chunks: list[str], include: bool
) -> None:
    sent, matched = run(stops, chunks, include)
    assert ("".join(sent), matched) == cut_by_definition("".join(chunks), stops, include)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    text=st.text("abc", max_size=30),
)
def test_no_more_is_held_back_than_could_begin_a_stop(stops: list[str], text: str) -> None:
    machine = StopStrings(stops)
    sent = ""
    for position, character in enumerate(text):
        emitted, matched = machine.push(character)
        if matched is not None:
            return
        sent += emitted
        seen = text[: position + 1]
        held = seen[len(sent) :]
        begins = [
            stop[:n] for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])
        ]
        assert held == max(begins, key=len, default="")
