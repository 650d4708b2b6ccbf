"""Repositories of ModelScope, over its plain HTTP routes.

https://github.com/modelscope/modelscope/blob/e68c32716d64b7e65b9d6b80b4a8d914f57badbb/modelscope/hub/file_download.py
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from invar.weights.hub import Got, HubFile
from invar.weights.model_cache import COPY_BYTES, ModelSourceError

DEFAULT_ENDPOINT = "https://modelscope.cn"
DEFAULT_REVISION = "master"
TIMEOUT_S = 60
UNFINISHED = ".unfinished"


class ModelScope:
    """`MODELSCOPE_DOMAIN` names another endpoint, `MODELSCOPE_API_TOKEN` is the user's token."""

    def __init__(self, repository: str, revision: str | None) -> None:
        domain = os.environ.get("MODELSCOPE_DOMAIN", DEFAULT_ENDPOINT)
        endpoint = domain if "://" in domain else f"https://{domain}"
        self.repository = repository
        self.revision = revision or DEFAULT_REVISION
        self.url = f"{endpoint.rstrip('/')}/api/v1/models/{repository}/repo"

    def files(self) -> list[HubFile]:
        with self._open("/files", Revision=self.revision, Recursive="True") as answer:
            listed = json.load(answer)["Data"]["Files"]
        return [
            HubFile(entry["Path"], entry.get("Size"), entry.get("Sha256") or None)
            for entry in listed
            if entry.get("Type") != "tree"
        ]

    def download(self, file: HubFile, folder: Path, got: Got) -> Path:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + UNFINISHED)
        done = partial.stat().st_size if partial.exists() else 0
        if done == 0 or done != file.size_bytes:
            with self._open("", done, Revision=self.revision, FilePath=file.name) as answer:
                resumed = answer.status == 206
                with partial.open("ab" if resumed else "wb") as out:
                    while chunk := answer.read(COPY_BYTES):
                        out.write(chunk)
                        got(out.tell())
            if file.size_bytes is not None and partial.stat().st_size < file.size_bytes:
                raise ModelSourceError(
                    f"modelscope:{self.repository}: {file.name}: the connection ended early; pull "
                    "again to go on where it stopped"
                )
        os.replace(partial, target)
        return target

    def _open(self, route: str, start: int = 0, **query: str) -> Any:
        request = urllib.request.Request(f"{self.url}{route}?{urllib.parse.urlencode(query)}")
        token = os.environ.get("MODELSCOPE_API_TOKEN")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        if start:
            request.add_header("Range", f"bytes={start}-")
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                problem = "access is refused; set MODELSCOPE_API_TOKEN to a token of yours"
            elif error.code == 404:
                problem = f"there is no such repository, file or revision ({self.revision})"
            else:
                raise
            raise ModelSourceError(f"modelscope:{self.repository}: {problem}") from error
