"""Hubs over HTTP: a local server with their routes, and `invar pull` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from golden.hf_form import write_hf_directory
from golden.tiny_models import model_path
from weights.hub_server import (
    TOKEN,
    LocalHub,
    commit_of,
    invar,
    local_hub,
    pulled,
    refused,
    repository,
)

from invar.weights.hf_directory import INDEX, HFDirectory
from invar.weights.hub import HubName, directory_files


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LocalHub]:
    directory = write_hf_directory("llama_gqa", tmp_path / "origin", "BF16", shards=2)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    extra = {"README.md": b"hi", "pytorch_model.bin": b"\x80\x02", "onnx/model.onnx": b"x"}
    with local_hub() as hub:
        hub.repositories = {
            "org/tiny": repository(files | extra),
            "org/quants": repository({"m-Q8_0.gguf": model_path("llama_gqa").read_bytes()}),
            "org/gated": repository(files, gated=True),
            "org/pickled": repository({"config.json": b"{}", "pytorch_model.bin": b"\x80\x02"}),
        }
        yield hub


def test_a_directory_is_pulled_whole_and_served_offline(hub: LocalHub, tmp_path: Path) -> None:
    path = pulled(invar(hub, tmp_path, "pull", "org/tiny"))
    assert path.is_dir()
    assert {file.name for file in path.iterdir()} == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX),
        "manifest.json",
    }
    assert all(commit_of("main") in line for line in hub.requests if "/resolve/" in line)
    asked = len(hub.requests)
    report = invar(hub, tmp_path, "inspect", "org/tiny", "--json", HF_HUB_OFFLINE="1")
    assert json.loads(report.stdout)["architecture"] == "llama"
    assert len(hub.requests) == asked


def test_other_files_of_a_tokenizer_are_pulled_where_there_is_no_tokenizer_json() -> None:
    name = HubName("org/old", None, None)
    names = ["config.json", "model.safetensors", "tokenizer.model", "added_tokens.json", "x.bin"]
    assert set(directory_files(name, names)) == {*names} - {"x.bin"}
    found = directory_files(name, [*names, "tokenizer.json"])
    assert set(found) == {"config.json", "tokenizer.json", "model.safetensors"}


def test_a_gated_repository_says_what_to_do(hub: LocalHub, tmp_path: Path) -> None:
    line = refused(invar(hub, tmp_path, "pull", "org/gated"))
    assert "hf:org/gated: the repository is gated" in line
    assert "HF_TOKEN" in line
    assert pulled(invar(hub, tmp_path, "pull", "org/gated", HF_TOKEN=TOKEN)).is_dir()


def test_what_is_not_there_is_told_apart(hub: LocalHub, tmp_path: Path) -> None:
    for name, message in {
        "org/none": "there is no such repository, or it is private",
        "org/tiny@v9": "no such revision",
        "org/pickled": "pickles, which could run any code",
    }.items():
        assert message in refused(invar(hub, tmp_path, "pull", name)), name
    offline = invar(hub, tmp_path, "pull", "org/tiny", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in refused(offline)


def test_a_revision_is_pinned(hub: LocalHub, tmp_path: Path) -> None:
    files = hub.repositories["org/tiny"].files
    changed = files["config.json"].replace(b'"rope_theta": 10000.0', b'"rope_theta": 20000.0')
    hub.repositories["org/tiny"].revisions["v1"] = files | {"config.json": changed}
    path = pulled(invar(hub, tmp_path, "pull", "hf:org/tiny@v1"))
    assert (path / "config.json").read_bytes() == changed
    assert all(commit_of("v1") in line for line in hub.requests if "/resolve/" in line)
    other = pulled(invar(hub, tmp_path, "pull", "org/tiny"))
    assert other != path
    assert (other / "config.json").read_bytes() == files["config.json"]


def test_a_file_that_is_not_what_the_hub_lists_is_refused(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m-Q8_0.gguf.unfinished").write_bytes(b"something else")
    words = ("pull", "ms:org/quants", "--local-dir", "models")
    assert "the hub lists" in refused(invar(hub, tmp_path, *words))
    path = tmp_path / pulled(invar(hub, tmp_path, *words))
    assert path.read_bytes() == hub.repositories["org/quants"].files["m-Q8_0.gguf"]


def test_modelscope(hub: LocalHub, tmp_path: Path) -> None:
    path = pulled(invar(hub, tmp_path, "pull", "modelscope:org/tiny"))
    HFDirectory(path).close()
    assert "there is no such repository" in refused(invar(hub, tmp_path, "pull", "ms:org/none"))
    hub.cut_once = {"m-Q8_0.gguf"}
    words = ("pull", "ms:org/quants", "--local-dir", "models")
    refused(invar(hub, tmp_path, *words))
    resumed = tmp_path / pulled(invar(hub, tmp_path, *words))
    assert resumed.read_bytes() == hub.repositories["org/quants"].files["m-Q8_0.gguf"]
    assert any("bytes=" in line for line in hub.requests)


def test_what_hugging_faces_own_cache_has_is_used(hub: LocalHub, tmp_path: Path) -> None:
    folder = tmp_path / "hf" / "hub" / "models--org--mine"
    commit = commit_of("main")
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots").mkdir()
    snapshot = write_hf_directory("llama_gqa", folder / "snapshots" / commit, shards=2)
    inspect = invar(hub, tmp_path, "inspect", "org/mine", "--json")
    assert json.loads(inspect.stdout)["files"][0] == str(snapshot / "config.json")
    assert not hub.requests
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    assert "there is no such repository" in refused(invar(hub, tmp_path, "inspect", "org/mine"))


def test_a_revision_and_a_form_are_asked_for_by_options(hub: LocalHub, tmp_path: Path) -> None:
    """Of a repository that has both forms, the second of which says another context."""
    files = hub.repositories["org/tiny"].files
    shorter = files["config.json"].replace(
        b'"max_position_embeddings": 2048', b'"max_position_embeddings": 1024'
    )
    assert shorter != files["config.json"]
    both = hub.repositories["org/both"] = repository(
        files | {"m.gguf": model_path("llama_gqa").read_bytes()}
    )
    both.revisions["v1"] = both.files | {"config.json": shorter}

    def pulled_as(*words: str) -> str:
        """The name in the cache of what this command pulled."""
        before = set((tmp_path / "invar" / "models").glob("*/manifest.json"))
        options = ("-p", "hello", "-n", "2", "--ignore-eos")
        result = invar(hub, tmp_path, "run", "org/both", *options, *words)
        assert result.returncode == 0, result.stderr
        (new,) = set((tmp_path / "invar" / "models").glob("*/manifest.json")) - before
        return new.parent.name

    assert "safetensors" not in pulled_as()
    assert "--as--safetensors" in pulled_as("--load-format", "safetensors")
    assert "--v1--as--safe" in pulled_as("--load-format", "safetensors", "--revision", "v1")
    folder = next((tmp_path / "invar" / "models").glob("*v1*safetensors*"))
    assert (folder / "config.json").read_bytes() == shorter
    for words, message in (
        (("org/tiny", "--load-format", "gguf"), "no .gguf file matches"),
        (("org/both@v1", "--revision", "main"), "and revision main: name one"),
        ((str(model_path("llama_gqa")), "--revision", "v1"), "it is a file of this machine"),
        ((str(model_path("llama_gqa")), "--load-format", "safetensors"), "give the directory"),
        ((str(folder), "--load-format", "gguf"), "must hold exactly one model in GGUF"),
        (("smollm2", "--revision", "v1"), "it comes from the package index"),
        (("smollm2", "--load-format", "safetensors"), "it comes as GGUF alone"),
    ):
        assert message in refused(invar(hub, tmp_path, "run", *words, "-p", "x")), words
