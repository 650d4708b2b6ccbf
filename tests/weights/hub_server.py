"""A local HTTP server with the routes of the Hugging Face hub and of ModelScope.

https://huggingface.co/docs/hub/api and the headers that `huggingface_hub` reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_secret"


@dataclass
class Repository:
    """Files by revision; `main` and its commit are the same."""

    revisions: dict[str, dict[str, bytes]]
    gated: bool = False

    @property
    def files(self) -> dict[str, bytes]:
        return self.revisions["main"]


def repository(files: Mapping[str, bytes], gated: bool = False) -> Repository:
    return Repository({"main": dict(files)}, gated)


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class LocalHub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # method, path and range of each
    altered: set[str] = field(default_factory=set)  # files that come with other bytes than listed
    cut_once: set[str] = field(default_factory=set)  # files whose first download breaks off
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(unquote(self.path))
        self.hub.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}")
        parts = url.path.strip("/").split("/")
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if parts[:3] == ["api", "v1", "models"]:
            self.modelscope("/".join(parts[3:5]), parts[5:], query)
        elif parts[:2] == ["api", "models"]:
            self.model_info("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
        elif parts[2:3] == ["resolve"]:
            self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.error(404, "NotFound")

    def model_info(self, name: str, revision: str) -> None:
        files = self.allowed_files(name, revision, at_file=False)
        if files is None:
            return
        siblings = [
            {
                "rfilename": file,
                "size": len(content),
                "lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
                | {"pointerSize": 130},
            }
            for file, content in files.items()
        ]
        self.answer({"id": name, "sha": self.commit(revision), "siblings": siblings})

    def resolve(self, name: str, revision: str, file: str) -> None:
        files = self.allowed_files(name, revision, at_file=True)
        if files is None:
            return
        if file not in files:
            self.error(404, "EntryNotFound")
            return
        self.content(file, files[file], self.commit(revision))

    def commit(self, revision: str) -> str:
        return revision if len(revision) == 40 else commit_of(revision)

    def allowed_files(self, name: str, revision: str, at_file: bool) -> dict[str, bytes] | None:
        found = self.hub.repositories.get(name)
        if found is None:
            self.error(404, "RepoNotFound")
        elif found.gated and at_file and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.error(403, "GatedRepo")
        else:
            named = {commit_of(key): files for key, files in found.revisions.items()}
            files = (found.revisions | named).get(revision)
            if files is None:
                self.error(404, "RevisionNotFound")
            return files
        return None

    def modelscope(self, name: str, route: list[str], query: Mapping[str, str]) -> None:
        found = self.hub.repositories.get(name)
        files = found and found.revisions.get(query["Revision"].replace("master", "main"))
        if files is None:
            self.error(404, "NotFound")
        elif route == ["repo", "files"]:
            listed = [
                {"Path": file, "Type": "blob", "Size": len(content)}
                | {"Sha256": hashlib.sha256(content).hexdigest()}
                for file, content in files.items()
            ]
            self.answer({"Code": 200, "Data": {"Files": [*listed, {"Path": "d", "Type": "tree"}]}})
        else:
            self.content(query["FilePath"], files[query["FilePath"]], "")

    def content(self, file: str, content: bytes, commit: str) -> None:
        if file in self.hub.altered:
            content = content[:-1] + bytes([content[-1] ^ 1])
        asked = self.headers.get("Range", "")
        begin = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        if file in self.hub.cut_once:
            self.hub.cut_once.remove(file)
            self.wfile.write(content[begin : len(content) // 2])
            self.close_connection = True
            return
        self.wfile.write(content[begin:])

    def answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    hub = LocalHub()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


# ---------------------------------------------------------------- the command beside it


def environment(hub: LocalHub, home: Path, **more: str) -> dict[str, str]:
    """Of a user whose hub is this one, and whose caches are below `home`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own |= {"HF_ENDPOINT": hub.url, "MODELSCOPE_DOMAIN": hub.url, "HF_HUB_DISABLE_XET": "1"}
    own |= {"HF_HOME": str(home / "hf"), "INVAR_CACHE": str(home / "invar")}
    return own | {"PYTHONPATH": ":".join(sys.path)} | more


def invar(hub: LocalHub, home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "invar.cli.main", *words]
    return subprocess.run(
        command, env=environment(hub, home, **more), capture_output=True, text=True, cwd=home
    )


def pulled(result: subprocess.CompletedProcess[str]) -> Path:
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip())


def refused(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    line = result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr
    return line
