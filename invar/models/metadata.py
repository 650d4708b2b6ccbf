"""Reading a model's configuration from GGUF metadata: typed, with errors that name the key."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from invar.graph.graph import WeightSource

LARGEST_INTEGER = 2**31 - 1
"""Widths, counts and positions are int32 in the kernels."""

SMALLEST_REAL, LARGEST_REAL = 2.0**-126, 2.0**127
"""Normal numbers of float32, in which the kernels compute: nothing between becomes 0 or inf."""


class ModelSource(WeightSource, Protocol):
    """Weights with the metadata that says how to put them together; `GGUFFile` is one."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...


class ConfigError(ValueError):
    """A model whose configuration is incomplete, contradictory or asks for what is not built."""


class ArchitectureKeys:
    """The keys `<architecture>.*`; names are given without that prefix, `None` means absent.

    Integers are counts or sizes and reals are scales: one below `least`, or too large to compute
    with, is refused here, before anything is made from it.
    """

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture
        # A directory's metadata knows what its keys are called in config.json.
        self._written_as: Mapping[str, str] = getattr(metadata, "written_as", {})

    def integer(self, name: str) -> int:
        value = self.optional_integer(name)
        if value is None:
            raise self._missing(name, "an integer")
        return value

    def real(self, name: str) -> float:
        value = self.optional_real(name)
        if value is None:
            raise self._missing(name, "a number")
        return value

    def optional_integer(self, name: str, least: int = 1) -> int | None:
        value = self.metadata.get(self._key(name))
        if value is None:
            return None
        if _is_integer(value) and least <= value <= LARGEST_INTEGER:
            return int(value)
        raise self._mismatch(name, f"an integer from {least} to {LARGEST_INTEGER}", value)

    def optional_real(self, name: str, least: float = SMALLEST_REAL) -> float | None:
        value = self.metadata.get(self._key(name))
        if value is None:
            return None
        is_real = isinstance(value, numbers.Real | np.number) and not isinstance(value, bool)
        if is_real and least <= value <= LARGEST_REAL:
            return float(value)
        raise self._mismatch(name, f"a number from {least:.3g} to {LARGEST_REAL:.3g}", value)

    def optional_flag(self, name: str) -> bool | None:
        value = self.metadata.get(self._key(name))
        if value is None or isinstance(value, bool):
            return value
        raise self._mismatch(name, "true or false", value)

    def optional_text(self, name: str) -> str | None:
        value = self.metadata.get(self._key(name))
        if value is None or isinstance(value, str):
            return value
        raise self._mismatch(name, "a string", value)

    def optional_mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self.metadata.get(self._key(name))
        if value is None or isinstance(value, Mapping):
            return value
        raise self._mismatch(name, "an object", value)

    def same_for_all_layers(self, name: str, layers: int) -> int | None:
        """A number, or an array with one number a layer that are all the same."""
        value = self.metadata.get(self._key(name))
        if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
            return self.optional_integer(name)
        entries = list(value)
        if len(entries) != layers or not all(_is_count(entry) for entry in entries):
            raise self._mismatch(name, f"a count or {layers} counts, one a layer", value)
        if len(set(entries)) != 1:
            raise ConfigError(
                f"{self.full(name)} differs between layers ({brief(entries)}); "
                f"{self.architecture} models of that kind are not supported yet"
            )
        return int(entries[0])

    def full(self, name: str) -> str:
        """What the key is called in the model's own files, for messages."""
        key = self._key(name)
        return self._written_as.get(key, key)

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _missing(self, name: str, expected: str) -> ConfigError:
        if self._written_as:
            return ConfigError(f"{self.full(name)} is missing, expected {expected}")
        near = difflib.get_close_matches(self.full(name), list(self.metadata), n=1, cutoff=0.8)
        hint = f" (nearest key present: {near[0]})" if near else ""
        return ConfigError(
            f"the model's metadata has no {self.full(name)}, expected {expected}{hint}; "
            "convert the model again with a current converter"
        )

    def _mismatch(self, name: str, expected: str, value: Any) -> ConfigError:
        return ConfigError(
            f"{self.full(name)} must be {expected}, found {type(value).__name__} {brief(value)}"
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and 1 <= value <= LARGEST_INTEGER


def brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
