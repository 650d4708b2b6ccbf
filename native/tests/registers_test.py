"""The hot loops of the kernels keep their sums in registers: their machine code says so.

    registers_test.py ARCHIVE COMPILER [FLAG...]

Disassembles the kernels with binutils' objdump (the compiler needs binutils as well) and looks, in
innermost loops that multiply vectors, for vector registers put on the stack. What was put there is
told by the instruction that wrote it: a sum of products fails, always. Two other things may lie on
the stack, up to a limit, because every way around it was slower (GOPS of one core of Zen 3):

- Totals of a K-quant, added to once per 16 or 32 K: beside 4 x 2 sums there is no room for them in
  16 registers. Kept in an array on purpose they cost more (M = 64: q4_k 230, so 220; q3_k 215, so
  203; q6_k 215, so 202), and so do smaller tiles: a load more per product.
- High bits, scales and constants, in tiles of packed codes: read again for every pair of quads
  instead, q5_0 at M = 4 fell from 136 to 119, q5_1 at M = 2 from 109 to 91.

Not looked at is attend_rows, the softmax between two products: its rows are arrays by design, and
its products are functions of their own. These (score_groups, weigh_groups) also store one masked
pair of V, which is no sum. Then the test proves on tiles that are too large that it sees a spill.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOT = re.compile(r"\b(tile_\w+|\w+_rounds|score_groups|weigh_groups)\b")
MULTIPLY = re.compile(r"v(fn?madd\d+ps|pmaddubsw|pmaddwd|pdpbusd|pdpwssd|dpbf16ps)")
SUM = re.compile(r"v(fn?madd\d+ps|paddw|pdpbusd|dpbf16ps)\b")
TOTAL = re.compile(
    r"v(paddd|pmaddwd)\b"
)  # int32 sums of q8_0 look the same: none allowed in tile_32
INTEGER_TILE = re.compile(r"tile_(?:32|256)<\w+::Format(\w+), \w+, (\d+), (\d+)>")
SUMS_PER_GROUP = {  # kSums of formats.h
    "Q2_K": 2,
    "Q3_K": 2,
    "Q4_K": 1,
    "Q5_K": 2,
    "Q6_K": 1,
    "IQ1": 2,
    "IQ2": 2,
    "IQ3_XXS": 2,
    "IQ3_S": 2,
    "IQ4_XS": 1,
    "TQ": 2,
}
# Of wide codes (kWide of formats.h) this is a sum: their totals add products of int32, the others'
# totals these.
ADDED_PAIRS = "vpaddd of vpmaddwd"
WIDE = {"IQ2", "IQ4_NL", "IQ4_XS"}
# High bits, scales and constants: a vector of each of four columns, and two masks.
MAX_OTHERS = 6
# Finished sums that wait for others of their group: GCC 12 adds or stores them together.
MAX_FINISHED = {"avx512::tile_256": 1}

TOO_LARGE = """
#include "kernels/gemm_float.h"
#include "kernels/gemm_row.h"
namespace invar::INVAR_ISA {
auto* floats = tile_float<StepF32, 12, kTileVectors>;
auto* integers = tile_32<FormatQ4_0, true, 12, kTileVectors>;
auto* bytes = tile_32<FormatQ8_0, false, 12, kTileVectors>;
auto* rows = tile_row<12, kTileVectors>;
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


def spilled(code: list[Instruction], loop: list[Instruction]) -> list[str]:
    """What put the vector registers together that a loop puts on the stack: instructions' names.

    Constants that lie there and are only read do not count.
    """
    framed = any(re.match(r"mov\s+%rsp,%rbp", i.text) for i in code)  # else %rbp is any register
    store = re.compile(rf"v\S+\s.*%[xyz]mm(\d+),[^,(]*\(%{'r[sb]p' if framed else 'rsp'}[^,]*$")
    stores = [(at, match[1]) for at, i in enumerate(loop) if (match := store.match(i.text))]
    return [writer(loop, at, register) for at, register in stores]


def writer(loop: list[Instruction], at: int, register: str) -> str:
    """The instruction before loop[at], the loop being a circle, that computed a register.

    One that adds a product of pairs is named with it (`ADDED_PAIRS`).
    """
    for back in range(1, len(loop) + 1):
        text = loop[at - back].text
        if not re.search(rf",%[xyz]mm{register}(\{{.*)?$", text):
            continue
        copy = re.match(r"vmov\S+\s+%[xyz]mm(\d+),", text)
        if copy is not None:
            register = copy[1]
            continue
        name, terms = text.split()[0], re.findall(r"%[xyz]mm(\d+)", text)[:-1]
        if name == "vpaddd" and "vpmaddwd" in {writer(loop, at - back, one) for one in terms}:
            return ADDED_PAIRS
        return name
    return "nothing in the loop"


def short(name: str) -> str:
    return re.sub(r"^void |invar::(\(anonymous namespace\)::)?|\(.*$", "", name)


def spills(path: Path) -> tuple[int, dict[str, list[str]]]:
    """How many hot loops there are, and what they put on the stack by function."""
    count, found = 0, {}
    for name, code in functions(path):
        loops = hot_loops(code)
        count += len(loops)
        if writers := [w for loop in loops for w in spilled(code, loop)]:
            found[short(name)] = writers
    return count, found


def complaint(name: str, writers: list[str]) -> str | None:
    """What a function may not put on the stack and does."""
    sums = sum(bool(SUM.match(w)) for w in writers)
    totals = sum(bool(TOTAL.match(w)) for w in writers)
    tile = INTEGER_TILE.search(name)
    if tile is not None and tile[1] in WIDE:
        pairs = writers.count(ADDED_PAIRS)
        sums, totals = sums + pairs, totals - pairs
    if tile is None:
        # All that tile_row adds to is a sum: it has no totals.
        sums += totals if "tile_row<" in name else 0
        return f"{name}: {sums} sums" if sums else None
    others = len(writers) - sums - totals
    columns = int(tile[2]) * int(tile[3])
    limits = {
        "sums": (sums, MAX_FINISHED.get(name.split("<")[0], 0)),
        "totals": (totals, SUMS_PER_GROUP.get(tile[1], 0) * columns),
        "others": (others, MAX_OTHERS),
    }
    over = [
        f"{found} {what} (at most {most})" for what, (found, most) in limits.items() if found > most
    ]
    return f"{name}: {', '.join(over)}" if over else None


def unseen_mutations(compile_command: list[str]) -> list[str]:
    """Tiles of twelve rows need more registers than there are: those that bring no complaint."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "too_large.cpp", Path(folder) / "too_large.o"
        source.write_text(TOO_LARGE)
        subprocess.run([*compile_command, "-c", str(source), "-o", str(target)], check=True)
        found = spills(target)[1]
        seen = [name for name, writers in found.items() if complaint(name, writers)]
    tiles = ("tile_float", "FormatQ4_0", "FormatQ8_0", "tile_row")
    return [tile for tile in tiles if not any(tile in name for name in seen)]


def main(archive: str, *compile_command: str) -> int:
    if shutil.which("objdump") is None:
        print("registers_test needs objdump: install binutils")
        return 1
    count, found = spills(Path(archive))
    failures = []
    for name, writers in sorted(found.items()):
        print(f"{name}: on the stack in its hot loops: {dict(Counter(writers))}")
        if problem := complaint(name, writers):
            failures.append(problem)
    if count == 0:
        failures.append("no hot loop found: were the kernels renamed?")
    failures += [
        f"twelve rows in {t} were not seen" for t in unseen_mutations(list(compile_command))
    ]
    print(f"registers_test: {count} hot loops; failed: {'; '.join(failures) or 'none'}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
