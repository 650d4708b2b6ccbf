"""From a model file to its graph, by the architecture that the file names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from invar.graph.graph import Graph, GraphError
from invar.models import gemma3, llama
from invar.models.metadata import ConfigError, ModelSource, brief
from invar.models.rope import FACTORS_TENSOR

ARCHITECTURES: Mapping[str, Callable[[ModelSource], Graph]] = {
    "gemma3": gemma3.build,
    "llama": llama.build,
}

ARCHITECTURE_KEY = "general.architecture"


def build(source: ModelSource) -> Graph:
    """The graph of a model.

    Raises `ConfigError` (architecture or metadata) or `GraphError` (a tensor that is missing, has
    the wrong shape or has no place in the architecture).
    """
    name = source.metadata.get(ARCHITECTURE_KEY)
    if name is None:
        raise ConfigError(
            f"the model's metadata has no {ARCHITECTURE_KEY}, expected a string; "
            "is this file a language model?"
        )
    if not isinstance(name, str):
        found = f"{type(name).__name__} {brief(name)}"
        raise ConfigError(f"{ARCHITECTURE_KEY} must be a string, found {found}")
    if name not in ARCHITECTURES:
        near = difflib.get_close_matches(name, ARCHITECTURES, n=3, cutoff=0.5)
        hint = f"; near ones: {', '.join(near)}" if near else ""
        raise ConfigError(
            f"architecture {brief(name)!r} is not supported{hint} "
            f"(supported: {', '.join(ARCHITECTURES)})"
        )
    graph = ARCHITECTURES[name](source)
    _refuse_unused_tensors(source, graph, name)
    return graph


def _refuse_unused_tensors(source: ModelSource, graph: Graph, architecture: str) -> None:
    """A tensor that nothing reads means that the file is another model than it says."""
    used = graph.weight_names() | {FACTORS_TENSOR}
    unused = sorted(source.tensors.keys() - used)
    if not unused:
        return
    near = difflib.get_close_matches(unused[0], used, n=1, cutoff=0.6)
    hint = f" (nearest that is known: {near[0]})" if near else ""
    others = f" and {len(unused) - 1} others" if len(unused) > 1 else ""
    raise GraphError(
        f"{unused[0]}{hint}{others}: the architecture {architecture!r} has no place for it; "
        "the file is of another model or was converted wrongly"
    )
