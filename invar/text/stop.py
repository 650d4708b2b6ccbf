"""Stop strings, found while text streams."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Passes text through until a stop string is complete; never lets a part of one escape.

    What is held back is the longest end of the text that begins a stop string, no more. The match
    is the one completed first (the longest of those that end together), so the answer does not
    depend on how the text was cut into chunks.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        """Raises ValueError for an empty stop string, which would end every answer at once."""
        if isinstance(stops, str):
            raise ValueError("stop: expected a list of strings, found one string")
        if not all(stops):
            raise ValueError("stop: an empty string cannot be a stop string")
        # Longest first, so that of matches ending together the first found is the longest.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include_in_output = include_in_output
        self._borders = [_borders(stop) for stop in self._stops]
        # How much of each stop string the text so far ends with (Knuth, Morris and Pratt 1977).
        self._matched_lengths = [0] * len(self._stops)
        self._openings = {stop[0] for stop in self._stops}
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one has."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; returns what may be sent and the stop string that is now complete.

        After a match all further text is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._held and self._openings.isdisjoint(text):
            return text, None
        for index, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None:
                seen = self._held + text[: index + 1]
                self._held, self._matched = "", stop
                return (seen if self._include_in_output else seen[: -len(stop)]), stop
        pending = self._held + text
        kept = len(pending) - max(self._matched_lengths)
        self._held = pending[kept:]
        return pending[:kept], None

    def flush(self) -> str:
        """The text ends here: what was held back, since it begins no stop string after all."""
        held, self._held = self._held, ""
        self._matched_lengths = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        complete: str | None = None
        for number, stop in enumerate(self._stops):
            length = self._matched_lengths[number]
            while length and stop[length] != character:
                length = self._borders[number][length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                complete = complete or stop
                length = self._borders[number][length - 1]
            self._matched_lengths[number] = length
        return complete


@lru_cache(maxsize=64)  # a request's choices and prompts, by the hundred, have the same stops
def _borders(text: str) -> tuple[int, ...]:
    """For each prefix of `text` the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        if text[index] == text[length]:
            length += 1
        borders[index] = length
    return tuple(borders)
