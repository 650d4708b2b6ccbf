"""Models from the Hugging Face hub, through `huggingface_hub` (imported only when used).

`huggingface_hub` knows the user's token, endpoint (`HF_ENDPOINT`) and proxy, and resumes a broken
download; the sum that the hub lists is checked here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invar.weights.gguf_split import shard_paths
from invar.weights.model_cache import CacheSlot, ModelSourceError, Progress, sha256_of

PREFERRED_QUANTIZATION = "Q4_K_M"
"""What llama.cpp's `-hf` takes when no file is named, so the same name brings the same file.
https://github.com/ggml-org/llama.cpp/blob/145b6280d6aa1890e22457143dad0badb3fd6820/common/arg.cpp"""

REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
HUB_NAME = re.compile(
    rf"(?P<prefix>hf:)?(?P<repository>{REPOSITORY})(@(?P<revision>[^:]+))?(:(?P<selection>.+))?"
)


@dataclass(frozen=True)
class HubName:
    """`hf:org/name[@revision][:file or quantization]`."""

    repository: str
    revision: str | None
    selection: str | None

    @property
    def source(self) -> str:
        """Canonical spelling; the key in the cache."""
        revision = f"@{self.revision}" if self.revision else ""
        selection = f":{self.selection}" if self.selection else ""
        return f"hf:{self.repository}{revision}{selection}"


@dataclass(frozen=True)
class HubFile:
    name: str
    size_bytes: int | None
    sha256: str | None


def parse_hub_name(model: str) -> HubName | None:
    """The parts of a hub name, or None if it is not one."""
    match = HUB_NAME.fullmatch(model)
    if match is None:
        return None
    return HubName(match["repository"], match["revision"], match["selection"])


def pull_hub(name: HubName, slot: CacheSlot, progress: Progress) -> Path:
    """Fetch one .gguf, or all shards of a split one, from the hub and publish it."""
    try:
        import huggingface_hub
    except ImportError:
        raise ModelSourceError(
            f"{name.source}: huggingface_hub is not installed; run `pip install huggingface_hub`"
        ) from None
    progress("asking the hub", 0, None)
    try:
        info = huggingface_hub.HfApi().model_info(
            name.repository, revision=name.revision, files_metadata=True
        )
        files = choose_files(name, list_gguf(info))
        total_bytes = sum(file.size_bytes or 0 for file in files)
        slot.require_space(total_bytes)
        staged: list[tuple[Path, str]] = []
        done_bytes = 0
        for file in files:
            progress("downloading", done_bytes, total_bytes)
            # The commit, not the branch: all shards come from one state of the repository.
            path = huggingface_hub.hf_hub_download(
                name.repository, file.name, revision=info.sha, local_dir=slot.staging
            )
            staged.append((Path(path), checked_sum(name, file, Path(path), progress)))
            done_bytes += file.size_bytes or 0
    except ModelSourceError:
        raise
    except Exception as error:  # the hub's errors share no base class with those of its transport
        raise ModelSourceError(
            f"{name.source}: the hub could not deliver it: {type(error).__name__}: "
            f"{first_line(error)}; check the name, the network and `hf auth login`"
        ) from error
    return slot.publish(staged)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def list_gguf(info: Any) -> list[HubFile]:
    """The .gguf files of a `ModelInfo`, with size and sum where the hub lists them."""
    files = []
    for sibling in info.siblings or []:
        if sibling.rfilename.endswith(".gguf"):
            lfs = sibling.lfs
            files.append(HubFile(sibling.rfilename, sibling.size, lfs.sha256 if lfs else None))
    return sorted(files, key=lambda file: file.name)


def choose_files(name: HubName, files: list[HubFile]) -> list[HubFile]:
    """The file that was asked for, or all of its shards in order."""
    by_name = {file.name: file for file in files}
    # One entry per model: of a split one, only the first shard.
    models = [file.name for file in files if is_first_shard(file.name)]
    selection = name.selection
    if selection in by_name:
        chosen = [selection]
    elif selection is not None:
        chosen = [model for model in models if selection.lower() in model.lower()]
    elif len(models) > 1:
        chosen = [model for model in models if PREFERRED_QUANTIZATION.lower() in model.lower()]
    else:
        chosen = models
    if len(chosen) != 1:
        problem = f"{len(chosen)} files match" if chosen else "no .gguf file matches"
        listed = ", ".join(models) or "none"
        raise ModelSourceError(
            f"{name.source}: {problem}; name one as hf:{name.repository}:FILE (there are: {listed})"
        )
    names = [str(path) for path in shard_paths(Path(chosen[0])) or [Path(chosen[0])]]
    missing = [shard for shard in names if shard not in by_name]
    if missing:
        raise ModelSourceError(f"{name.source}: the repository lacks shards: {', '.join(missing)}")
    return [by_name[shard] for shard in names]


def is_first_shard(file_name: str) -> bool:
    """True for the first shard of a split model, and for a file that is not split."""
    path = Path(file_name)
    shards = shard_paths(path)
    return shards is None or shards[0] == path


def checked_sum(name: HubName, file: HubFile, path: Path, progress: Progress) -> str:
    found = sha256_of(path, progress)
    if file.sha256 is not None and found != file.sha256:
        path.unlink()
        raise ModelSourceError(
            f"{name.source}: {file.name} has sha256 {found}, the hub lists {file.sha256}; "
            "pull again"
        )
    return found
