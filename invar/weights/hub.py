"""Models from a hub: Hugging Face (`huggingface_hub`, imported only when used) or ModelScope.

`huggingface_hub` knows the user's token, home (`HF_HOME`), endpoint (`HF_ENDPOINT`) and proxy, and
resumes a broken download; the sums that a hub lists are checked here. What Hugging Face's own cache
has already is used where it lies.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from invar.weights.gguf_split import shard_paths
from invar.weights.hf_directory import (
    CONFIG,
    INDEX,
    OTHER_TOKENIZERS,
    PICKLES,
    SHARD_NAME,
    SINGLE,
    SUFFIX,
    TEMPLATE,
    TEXT_FILES,
    read_weight_map,
)
from invar.weights.model_cache import CacheSlot, ModelSourceError, Progress, sha256_of

PREFERRED_QUANTIZATION = "Q4_K_M"
"""What llama.cpp's `-hf` takes when no file is named, so the same name brings the same file.
https://github.com/ggml-org/llama.cpp/blob/145b6280d6aa1890e22457143dad0badb3fd6820/common/arg.cpp"""

PREFIXES = {"hf": "hf", "modelscope": "modelscope", "ms": "modelscope"}
REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
HUB_NAME = re.compile(
    rf"((?P<prefix>{'|'.join(PREFIXES)}):)?(?P<repository>{REPOSITORY})"
    r"(@(?P<revision>[^:]+))?(:(?P<selection>.+))?"
)

EXPLANATIONS = {  # by the names of huggingface_hub's errors
    "GatedRepoError": "the repository is gated: ask for access on its page, then set HF_TOKEN to a "
    "token of yours (or run `hf auth login`)",
    "RepositoryNotFoundError": "there is no such repository, or it is private; check the name, "
    "and set HF_TOKEN if it is private",
    "RevisionNotFoundError": "the repository has no such revision; give a branch, a tag or a "
    "commit after @",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and the cache does not have it; unset it, or "
    "pull the model where there is a network",
}


Got = Callable[[int], None]  # hears how many bytes of a file are there


@dataclass(frozen=True)
class HubName:
    """`hf:org/name[@revision][:file or quantization]`, or `modelscope:…`."""

    repository: str
    revision: str | None
    selection: str | None
    hub: str = "hf"
    form: str = "auto"  # of the files; gguf, safetensors, or what there is, GGUF first

    @property
    def source(self) -> str:
        """Canonical spelling; the key in the cache."""
        revision = f"@{self.revision}" if self.revision else ""
        selection = f":{self.selection}" if self.selection else ""
        form = "" if self.form == "auto" else f" as {self.form}"
        return f"{self.hub}:{self.repository}{revision}{selection}{form}"


@dataclass(frozen=True)
class HubFile:
    name: str
    size_bytes: int | None
    sha256: str | None


class Hub(Protocol):
    """One repository of a hub, at one revision."""

    def files(self) -> list[HubFile]: ...

    def download(self, file: HubFile, folder: Path, got: Got) -> Path:
        """The file in `folder`, under its name; what is there of it is not fetched again."""


def parse_hub_name(model: str) -> HubName | None:
    """The parts of a hub name, or None if it is not one."""
    match = HUB_NAME.fullmatch(model)
    if match is None:
        return None
    hub = PREFIXES[match["prefix"] or "hf"]
    return HubName(match["repository"], match["revision"], match["selection"], hub)


def open_hub(name: HubName) -> Hub:
    if name.hub == "modelscope":
        from invar.weights.modelscope import ModelScope

        return ModelScope(name.repository, name.revision)
    try:
        import huggingface_hub
    except ImportError:
        raise ModelSourceError(
            f"{name.source}: huggingface_hub is not installed; run `pip install huggingface_hub`"
        ) from None
    return HuggingFace(huggingface_hub, name)


class HuggingFace:
    def __init__(self, library: Any, name: HubName) -> None:
        self.library = library
        self.name = name
        self.commit: str | None = name.revision

    def files(self) -> list[HubFile]:
        info = self.library.HfApi().model_info(
            self.name.repository, revision=self.name.revision, files_metadata=True
        )
        # The commit, not the branch: all files come from one state of the repository.
        self.commit = info.sha
        return [
            HubFile(s.rfilename, s.size, s.lfs.sha256 if s.lfs else None)
            for s in info.siblings or []
        ]

    def download(self, file: HubFile, folder: Path, got: Got) -> Path:
        fetch, options = self.library.hf_hub_download, {}
        if "tqdm_class" in inspect.signature(fetch).parameters:  # else the library shows its own
            options["tqdm_class"] = partial(FileBar, got)
        path = fetch(
            self.name.repository, file.name, revision=self.commit, local_dir=folder, **options
        )
        return Path(path)


class FileBar:
    """What `huggingface_hub` takes for a bar of tqdm: it says how much of a file is there."""

    def __init__(self, got: Got, *, total: int | None = None, initial: int = 0, **_: Any) -> None:
        self.got, self.total, self.n = got, total, initial
        got(initial)

    def update(self, count: int = 1) -> None:
        self.n += count
        self.got(self.n)

    def refresh(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> FileBar:
        return self

    def __exit__(self, *_: object) -> None: ...


def pull_hub(name: HubName, slot: CacheSlot, progress: Progress) -> Path:
    """Fetch a model into the cache: a .gguf, all shards of a split one, or a directory's files."""

    def take(hub: Hub) -> list[tuple[Path, str]]:
        files = choose_files(name, hub.files())
        slot.require_space(sum(file.size_bytes or 0 for file in files))
        return download_all(name, hub, files, slot.staging, progress)

    return slot.publish(asking(name, take, progress))


def pull_into(name: HubName, wanted: Sequence[str], folder: Path, progress: Progress) -> list[Path]:
    """Fetch the files of these names, or those of the model, into a folder of the user's."""

    def take(hub: Hub) -> list[tuple[Path, str]]:
        found = hub.files()
        by_name = {file.name: file for file in found}
        lacking = [file for file in wanted if file not in by_name]
        if lacking:
            raise ModelSourceError(
                f"{name.source}: has no {', '.join(lacking)} (there are: {', '.join(by_name)})"
            )
        files = [by_name[file] for file in wanted] if wanted else choose_files(name, found)
        folder.mkdir(parents=True, exist_ok=True)
        return download_all(name, hub, files, folder, progress)

    return [path for path, _ in asking(name, take, progress)]


def asking(name: HubName, take: Any, progress: Progress) -> Any:
    """`take` with an open hub; whatever goes wrong there is one line."""
    progress("asking the hub", 0, None)
    try:
        return take(open_hub(name))
    except ModelSourceError:
        raise
    except Exception as error:  # the hub's errors share no base class with those of its transport
        kind = type(error).__name__
        explanation = EXPLANATIONS.get(kind)
        if explanation is not None:
            raise ModelSourceError(f"{name.source}: {explanation}") from error
        raise ModelSourceError(
            f"{name.source}: the hub could not deliver it: {kind}: {first_line(error)}; check the "
            "name, the network and `hf auth login`"
        ) from error


def download_all(
    name: HubName, hub: Hub, files: Sequence[HubFile], folder: Path, progress: Progress
) -> list[tuple[Path, str]]:
    """Paths and sums; one that is wrong is deleted."""
    outside = [file.name for file in files if ".." in Path(file.name).parts or file.name[:1] == "/"]
    if outside:
        raise ModelSourceError(f"{name.source}: {outside[0]} would lie outside of the folder")
    total_bytes = sum(file.size_bytes or 0 for file in files)
    staged: list[tuple[Path, str]] = []
    done_bytes = 0
    for file in files:
        progress("downloading", done_bytes, total_bytes)

        def got(count: int, before: int = done_bytes) -> None:
            progress("downloading", before + count, total_bytes)

        path = hub.download(file, folder, got)
        staged.append((path, checked_sum(name, file, path, progress)))
        done_bytes += file.size_bytes or 0
    return staged


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def choose_files(name: HubName, files: Sequence[HubFile]) -> list[HubFile]:
    """A .gguf, all of its shards in order, or the files of a directory, config.json first."""
    by_name = {file.name: file for file in sorted(files, key=lambda file: file.name)}
    if name.form == "safetensors" and name.selection is not None:
        raise ModelSourceError(f"{name.source}: {name.selection} is of a GGUF; leave one out")
    has_gguf = any(file.endswith(".gguf") for file in by_name)
    takes_what_there_is = name.form == "auto" and name.selection is None and not has_gguf
    if takes_what_there_is or name.form == "safetensors":
        return [by_name[file] for file in directory_files(name, list(by_name))]
    return [by_name[file] for file in gguf_files(name, list(by_name))]


def gguf_files(name: HubName, names: Sequence[str]) -> list[str]:
    # One entry per model: of a split one, only the first shard.
    models = [file for file in names if file.endswith(".gguf") and is_first_shard(file)]
    selection = name.selection
    if selection is not None and selection in names and selection.endswith(".gguf"):
        chosen = [selection]
    elif selection is not None:
        chosen = [model for model in models if selection.lower() in model.lower()]
    elif len(models) > 1:
        chosen = [model for model in models if PREFERRED_QUANTIZATION.lower() in model.lower()]
    else:
        chosen = models
    if len(chosen) != 1:
        problem = f"{len(chosen)} files match" if chosen else "no .gguf file matches"
        raise ModelSourceError(
            f"{name.source}: {problem}; name one as {name.hub}:{name.repository}:FILE (there are: "
            f"{', '.join(models) or 'none'})"
        )
    shards = [str(path) for path in shard_paths(Path(chosen[0])) or [Path(chosen[0])]]
    missing = [shard for shard in shards if shard not in names]
    if missing:
        raise ModelSourceError(f"{name.source}: the repository lacks shards: {', '.join(missing)}")
    return shards


def directory_files(name: HubName, names: Sequence[str]) -> list[str]:
    """Configuration, tokenizer and safetensors; pickles are never fetched."""
    if CONFIG not in names:
        raise ModelSourceError(
            f"{name.source}: the repository has neither a .gguf file nor a {CONFIG}; is it a "
            "language model?"
        )
    found = [file for file in names if file.endswith(SUFFIX) and "/" not in file]
    if INDEX in names:
        weights = [INDEX, *(f for f in found if f.startswith("model") and SHARD_NAME.fullmatch(f))]
    elif SINGLE in names or len(found) == 1:
        weights = [SINGLE] if SINGLE in names else found
    else:
        pickles = [file for file in names if Path(file).suffix in PICKLES]
        why = "its weights are pickles, which could run any code and are never opened"
        raise ModelSourceError(
            f"{name.source}: {why if pickles and not found else 'there is no ' + SINGLE}; choose a "
            "repository or a revision with safetensors"
        )
    others = () if "tokenizer.json" in names else OTHER_TOKENIZERS
    wanted = (*TEXT_FILES, *others, TEMPLATE)
    texts = [file for file in wanted if file in names and file != CONFIG]
    return [CONFIG, *texts, *weights]


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


# ---------------------------------------------------------------- Hugging Face's own cache


def in_hf_cache(name: HubName) -> Path | None:
    """The model where `hf download` and other engines have put it, if all of it is there.

    Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    if name.hub != "hf":
        return None
    folder = hf_cache() / f"models--{name.repository.replace('/', '--')}"
    revision = name.revision or "main"
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        commit = revision
    snapshot = folder / "snapshots" / commit
    if Path(commit).name != commit or not snapshot.is_dir():
        return None
    present = [path for path in snapshot.rglob("*") if path.is_file()]
    files = [HubFile(str(path.relative_to(snapshot)), None, None) for path in present]
    try:
        chosen = choose_files(name, files)
    except ModelSourceError:
        return None
    if chosen[0].name != CONFIG:
        return snapshot / chosen[0].name
    return snapshot if complete(snapshot) else None


def complete(snapshot: Path) -> bool:
    """Whether every shard that the index names is there."""
    index = snapshot / INDEX
    if not index.exists():
        return True
    try:
        return all((snapshot / shard).is_file() for shard in set(read_weight_map(index).values()))
    except ValueError:
        return False


def hf_cache() -> Path:
    """`$HF_HUB_CACHE`, else `$HF_HOME/hub`, else `~/.cache/huggingface/hub`."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if own:
        return Path(own).expanduser()
    home = os.environ.get("HF_HOME")
    shared = os.environ.get("XDG_CACHE_HOME")
    cache = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return (Path(home).expanduser() if home else cache / "huggingface") / "hub"
