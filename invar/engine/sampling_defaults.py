"""How a model is sampled where a request is silent: what its own files, or the options, say.

| files of the model   | keys                                                                      |
|----------------------|---------------------------------------------------------------------------|
| a directory's        | `generation_config.json`, in the words of transformers                    |
| GGUF                 | `general.sampling.*`, which llama.cpp's converter makes of that file      |

`generation_config`: "auto" takes them, "vllm" does not, and a path names another
`generation_config.json` or its folder. `override_generation_config` comes last. All as in vLLM:
`get_diff_sampling_param` in
https://github.com/vllm-project/vllm/blob/v0.11.0/vllm/config/model.py
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from invar.config import EngineConfig
from invar.engine.sampling_params import INT32_MAX, SamplingParams
from invar.weights.hf_directory import GENERATION, required_json

if TYPE_CHECKING:
    from invar.engine.model_files import ModelText

logger = logging.getLogger("invar")

EOS = "eos_token_id"
# Names in a generation_config.json → those of SamplingParams.
TAKEN: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# What would change answers in transformers and is not built: the values that ask for nothing.
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "typical_p": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "penalty_alpha": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "sequence_bias": (None, {}),
    "xtc_probability": (None, 0),
    "mirostat": (None, 0),
    "sequence": (None, ""),  # of GGUF, as are the two before it
}


@dataclass(frozen=True)
class SamplingDefaults:
    """By the names of SamplingParams; a request's own values come before them."""

    values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    max_tokens: int | None = None  # most of any answer, whatever its request says
    eos_token_ids: frozenset[int] = frozenset()  # end answers besides the tokenizer's own
    source: str = ""  # of the values, for people

    def params(self) -> SamplingParams:
        """Of a request that says nothing."""
        return SamplingParams(**self.values)

    def within_limit(self, max_tokens: int | None) -> int | None:
        """Tokens of an answer whose request asks for `max_tokens`; None: as many as there fit."""
        if max_tokens is None:
            max_tokens = self.values.get("max_tokens")
        wanted = [count for count in (max_tokens, self.max_tokens) if count is not None]
        return min(wanted, default=None)

    @property
    def line(self) -> str | None:
        """What a request gets that says nothing, and from where; None where that is usual."""
        said = [f"{name} {value}" for name, value in self.values.items()]
        if self.max_tokens is not None:
            said = [one for one in said if not one.startswith("max_tokens")]
            said.append(f"at most {self.max_tokens} tokens an answer")
        return f"{', '.join(said)} ({self.source})" if said else None


def sampling_defaults(config: EngineConfig, text: ModelText) -> SamplingDefaults:
    """Raises ValueError for what the user gave; what a model's own file has wrong is left out, with
    a line that says so."""
    values: dict[str, Any] = {}
    eos: frozenset[int] = frozenset()
    sources, limit = [], None
    if config.generation_config == "auto":
        found, where = text.generation()
        values = lenient(found, where)
    elif config.generation_config != "vllm":
        where = str(given_file(config.generation_config))
        found = required_json(Path(where))
        values, eos = strict({k: v for k, v in found.items() if k in (*TAKEN, EOS)}, where)
        limit = values.get("max_tokens")
    if values:
        sources.append(where)
    overrides, more_eos = overriding(config)
    if overrides:
        values |= overrides
        limit = overrides.get("max_tokens", limit)
        sources.append("override_generation_config")
    return SamplingDefaults(
        MappingProxyType(values), limit, eos | more_eos, " and ".join(dict.fromkeys(sources))
    )


def overriding(config: EngineConfig) -> tuple[dict[str, Any], frozenset[int]]:
    """Of `override_generation_config`. Raises ValueError naming the key that is wrong."""
    return strict(config.override_generation_config or {}, "override_generation_config")


def given_file(path: str) -> Path:
    found = Path(path).expanduser()
    return found / GENERATION if found.is_dir() else found


def strict(found: Mapping[str, Any], where: str) -> tuple[dict[str, Any], frozenset[int]]:
    """Values, and ids that end an answer. Raises ValueError for anything that is no such thing."""
    values: dict[str, Any] = {}
    for name, value in found.items():
        if name not in (*TAKEN, EOS):
            near = difflib.get_close_matches(name, [*TAKEN, EOS], n=1)
            hint = f"nearest: {near[0]}" if near else f"known: {', '.join([*TAKEN, EOS])}"
            raise ValueError(f"{where}: {name[:60]!r} is not a default of sampling; {hint}")
        if value is not None and name != EOS:
            problem = what_is_wrong(TAKEN[name], value)
            if problem is not None:
                raise ValueError(f"{where}: {problem}")
            values[TAKEN[name]] = value
    return values, eos_ids(found.get(EOS), where)


def lenient(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What can be taken of a model's own file, and a line for each thing that cannot."""
    values: dict[str, Any] = {}
    for name, value in found.items():
        problem = None
        if name in TAKEN and value is not None:
            problem = what_is_wrong(TAKEN[name], value)
            if problem is None:
                values[TAKEN[name]] = value
        elif value not in NOT_BUILT.get(name, (value,)):
            problem = f"{name} is {str(value)[:60]}, which is not built"
        if problem is not None:
            logger.warning("%s: left out: %s", where, problem)
    return values


def what_is_wrong(name: str, value: Any) -> str | None:
    """With a value of SamplingParams, in one line."""
    try:
        SamplingParams(**{name: value})
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def eos_ids(given: Any, where: str) -> frozenset[int]:
    ids = given if isinstance(given, list) else [] if given is None else [given]
    for one in ids:
        if type(one) is not int or not 0 <= one <= INT32_MAX:
            raise ValueError(f"{where}: {EOS}: {str(one)[:60]} is not a token id")
    return frozenset(ids)
