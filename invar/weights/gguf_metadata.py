"""Metadata of a GGUF file: a lazy mapping, and getters that name key, expected and found type."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar, overload

from invar.weights.gguf_shard import Shard
from invar.weights.gguf_values import FLOAT_KINDS, INTEGER_KINDS, Entry, GGUFError, ValueKind

Default = TypeVar("Default")


class Required:
    """Type of `REQUIRED`, the default that stands for "no default": a missing key is an error."""


REQUIRED: Final = Required()

BOOL_KINDS = frozenset({ValueKind.BOOL})
STRING_KINDS = frozenset({ValueKind.STRING})


class Metadata(Mapping[str, Any]):
    """Values are decoded when asked for, then kept: Python scalars, str, lists of str, arrays."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            if key not in self._shard.entries:
                raise KeyError(key)
            self._decoded[key] = self._shard.value(key)
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard.entries)

    def __len__(self) -> int:
        return len(self._shard.entries)

    def __contains__(self, key: object) -> bool:
        return key in self._shard.entries

    def entry(self, key: str) -> Entry | None:
        """Type and length of a value, without decoding it."""
        return self._shard.entries.get(key)

    @property
    def file_name(self) -> str:
        return self._shard.path.name


class TypedGetters:
    """Typed access to `metadata`. Without a default, a missing key raises `GGUFError`.

    Any width of integer serves as an integer; nothing else is converted.
    """

    metadata: Metadata

    @overload
    def get_int(self, key: str) -> int: ...
    @overload
    def get_int(self, key: str, default: Default) -> int | Default: ...
    def get_int(self, key: str, default: Any = REQUIRED) -> Any:
        return self._scalar(key, INTEGER_KINDS, "an integer", default)

    @overload
    def get_float(self, key: str) -> float: ...
    @overload
    def get_float(self, key: str, default: Default) -> float | Default: ...
    def get_float(self, key: str, default: Any = REQUIRED) -> Any:
        return self._scalar(key, FLOAT_KINDS, "a float", default)

    @overload
    def get_str(self, key: str) -> str: ...
    @overload
    def get_str(self, key: str, default: Default) -> str | Default: ...
    def get_str(self, key: str, default: Any = REQUIRED) -> Any:
        return self._scalar(key, STRING_KINDS, "a string", default)

    @overload
    def get_bool(self, key: str) -> bool: ...
    @overload
    def get_bool(self, key: str, default: Default) -> bool | Default: ...
    def get_bool(self, key: str, default: Any = REQUIRED) -> Any:
        return self._scalar(key, BOOL_KINDS, "a bool", default)

    @overload
    def get_ints(self, key: str, *, length: int | None = None) -> list[int]: ...
    @overload
    def get_ints(
        self, key: str, default: Default, *, length: int | None = None
    ) -> list[int] | Default: ...
    def get_ints(self, key: str, default: Any = REQUIRED, *, length: int | None = None) -> Any:
        return self._array(key, INTEGER_KINDS, "an array of integers", default, length)

    @overload
    def get_floats(self, key: str, *, length: int | None = None) -> list[float]: ...
    @overload
    def get_floats(
        self, key: str, default: Default, *, length: int | None = None
    ) -> list[float] | Default: ...
    def get_floats(self, key: str, default: Any = REQUIRED, *, length: int | None = None) -> Any:
        return self._array(key, FLOAT_KINDS, "an array of floats", default, length)

    @overload
    def get_bools(self, key: str, *, length: int | None = None) -> list[bool]: ...
    @overload
    def get_bools(
        self, key: str, default: Default, *, length: int | None = None
    ) -> list[bool] | Default: ...
    def get_bools(self, key: str, default: Any = REQUIRED, *, length: int | None = None) -> Any:
        return self._array(key, BOOL_KINDS, "an array of bools", default, length)

    @overload
    def get_strs(self, key: str, *, length: int | None = None) -> list[str]: ...
    @overload
    def get_strs(
        self, key: str, default: Default, *, length: int | None = None
    ) -> list[str] | Default: ...
    def get_strs(self, key: str, default: Any = REQUIRED, *, length: int | None = None) -> Any:
        return self._array(key, STRING_KINDS, "an array of strings", default, length)

    @overload
    def get_ints_per_layer(self, key: str, layers: int) -> list[int]: ...
    @overload
    def get_ints_per_layer(
        self, key: str, layers: int, default: Default
    ) -> list[int] | Default: ...
    def get_ints_per_layer(self, key: str, layers: int, default: Any = REQUIRED) -> Any:
        """One integer for every layer, stored as an array of `layers` or as one number for all."""
        entry = self.metadata.entry(key)
        if entry is not None and entry.kind in INTEGER_KINDS:
            return [self.metadata[key]] * layers
        expected = "an integer or an array of integers"
        return self._array(key, INTEGER_KINDS, expected, default, layers)

    def _scalar(self, key: str, kinds: frozenset[ValueKind], expected: str, default: Any) -> Any:
        entry = self.metadata.entry(key)
        if entry is None:
            return self._absent(key, expected, default)
        if entry.kind not in kinds:
            raise self._mismatch(key, expected, entry)
        return self.metadata[key]

    def _array(
        self,
        key: str,
        kinds: frozenset[ValueKind],
        expected: str,
        default: Any,
        length: int | None,
    ) -> Any:
        entry = self.metadata.entry(key)
        if entry is None:
            return self._absent(key, expected, default)
        if entry.element not in kinds:
            raise self._mismatch(key, expected, entry)
        if length is not None and entry.count != length:
            raise self._mismatch(key, f"{expected} ({length} entries)", entry)
        value = self.metadata[key]
        return list(value) if isinstance(value, list) else value.tolist()

    def _mismatch(self, key: str, expected: str, entry: Entry) -> GGUFError:
        return GGUFError(
            f"{self.metadata.file_name}: key {key}: expected {expected}, found {entry.describe()}; "
            "convert the model again"
        )

    def _absent(self, key: str, expected: str, default: Any) -> Any:
        if default is not REQUIRED:
            return default
        near = difflib.get_close_matches(key, list(self.metadata), n=1, cutoff=0.8)
        hint = f"; the nearest key present is {near[0]}" if near else ""
        raise GGUFError(
            f"{self.metadata.file_name}: key {key} is missing (expected {expected}){hint}; "
            "convert the model again"
        )
