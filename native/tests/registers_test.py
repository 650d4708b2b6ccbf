"""The hot loops of the kernels keep their sums in registers: their machine code says so.

    registers_test.py ARCHIVE COMPILER [FLAG...]

Disassembles the kernels with binutils' objdump (the compiler needs binutils as well) and fails
where an innermost loop that multiplies vectors puts a vector register on the stack. Then proves on
a tile that is too large that it would have seen a spill.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Functions whose loops are the work. The first are held to it; the rest are reported.
HELD = re.compile(r"\b(tile_float|\w+_rounds)\b")
HOT = re.compile(rf"{HELD.pattern}|\b(tile_\w+|attend_rows)\b")
MULTIPLY = re.compile(r"v(fn?madd\d+ps|pmaddubsw|pmaddwd|pdpbusd|pdpwssd|dpbf16ps)")

TOO_LARGE = """
#include "kernels/gemm_float.h"
namespace invar::INVAR_ISA {
auto* too_large = tile_float<StepF32, 12, kTileVectors>;
}
"""


@dataclass
class Instruction:
    address: int
    text: str


def functions(path: Path) -> Iterator[tuple[str, list[Instruction]]]:
    """Demangled name and instructions of every hot function."""
    command = [
        "objdump",
        "--disassemble",
        "--demangle",
        "--no-show-raw-insn",
        str(path),
    ]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for block in listing.split("\n\n"):
        header, _, body = block.partition(":\n")
        name = re.match(r"\s*[0-9a-f]+ <(.*)>$", header)
        if name and HOT.search(name[1]):
            lines = [line.split(":\t", 1) for line in body.splitlines() if ":\t" in line]
            yield (
                name[1],
                [Instruction(int(at, 16), text.strip()) for at, text in lines],
            )


def hot_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Innermost loops with a multiplication: from the target of a backward jump to the jump."""
    loops = []
    for jump in code:
        target = re.match(r"j\w+\s+([0-9a-f]+) <", jump.text)
        if target and int(target[1], 16) < jump.address:
            body = [i for i in code if int(target[1], 16) <= i.address <= jump.address]
            if any(MULTIPLY.match(i.text) for i in body):
                loops.append(body)
    return [
        loop
        for loop in loops
        if not any(
            other is not loop
            and loop[0].address <= other[0].address
            and other[-1].address <= loop[-1].address
            and len(other) < len(loop)
            for other in loops
        )
    ]


def spilled(code: list[Instruction], loop: list[Instruction]) -> list[Instruction]:
    """Instructions of a loop that put a vector register on the stack.

    Constants that lie there and are only read do not count: they are not sums.
    """
    framed = any(re.match(r"mov\s+%rsp,%rbp", i.text) for i in code)  # else %rbp is any register
    store = re.compile(rf"v\S+\s.*%[xyz]mm\d+,[^,(]*\(%{'r[sb]p' if framed else 'rsp'}[^,]*$")
    return [i for i in loop if store.match(i.text)]


def short(name: str) -> str:
    return re.sub(r"^void |invar::(\(anonymous namespace\)::)?|\(.*$", "", name)


def spills(path: Path) -> tuple[int, dict[str, int]]:
    """How many hot loops there are, and sums put on the stack by function."""
    count, found = 0, {}
    for name, code in functions(path):
        loops = hot_loops(code)
        count += len(loops)
        if stores := sum(len(spilled(code, loop)) for loop in loops):
            found[short(name)] = stores
    return count, found


def mutation_is_seen(compile_command: list[str]) -> bool:
    """A tile of twelve rows needs more registers than there are."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "too_large.cpp", Path(folder) / "too_large.o"
        source.write_text(TOO_LARGE)
        subprocess.run([*compile_command, "-c", str(source), "-o", str(target)], check=True)
        return bool(spills(target)[1])


def main(archive: str, *compile_command: str) -> int:
    if shutil.which("objdump") is None:
        print("registers_test needs objdump: install binutils")
        return 1
    count, found = spills(Path(archive))
    failures = []
    for name, stores in sorted(found.items()):
        print(f"{name}: {stores} sums go to the stack in its hot loops")
        if HELD.search(name):
            failures.append(name)
    if count == 0:
        failures.append("no hot loop found: were the kernels renamed?")
    if not mutation_is_seen(list(compile_command)):
        failures.append("a tile of twelve rows was not seen to spill")
    print(f"registers_test: {count} hot loops; failed: {', '.join(failures) or 'none'}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
