"""Invar: an engine for serving large language models whose answer depends on the request alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from invar.engine.sampling_params import RequestOutputKind, SamplingParams
    from invar.grammar.structured_outputs import StructuredOutputs
    from invar.llm import LLM
    from invar.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
]

_HOMES = {
    "LLM": "invar.llm",
    "CompletionOutput": "invar.outputs",
    "Logprob": "invar.outputs",
    "RequestOutput": "invar.outputs",
    "RequestOutputKind": "invar.engine.sampling_params",
    "SamplingParams": "invar.engine.sampling_params",
    "StructuredOutputs": "invar.grammar.structured_outputs",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use, so that `import invar` costs a command nothing."""
    if name == "__version__":
        from invar.observe.build import version_text

        return version_text()
    if name not in _HOMES:
        raise AttributeError(f"module 'invar' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
