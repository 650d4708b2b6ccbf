"""Tables and sizes as text."""

from __future__ import annotations

from collections.abc import Sequence


def size_text(count: int) -> str:
    """Bytes in binary units, three digits or so."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns two blanks apart; those in ``right`` are flush right."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def memory_table(rows: Sequence[tuple[str, int]]) -> str:
    total = ("together", sum(count for _, count in rows))
    return table([(what, size_text(count)) for what, count in (*rows, total)], right=(1,))
