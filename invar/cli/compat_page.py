"""docs/cli_compat.md is what `python -m invar.cli.compat_page` prints."""

from __future__ import annotations

from collections.abc import Iterable

from invar.cli.compat import BOTH, PEERS, Rule, Takes
from invar.peer_options import ABSENT, INERT

HEAD = """# The peers' flags on Invar

Made from the tables in `invar/cli/compat.py`; do not edit. Hyphens and underscores are the same in
long options. A flag that is in no table is an error that names the nearest known one.

"Engine option" means that the flag sets the option of that name; `invar/config.py` says whether it
does something on this backend. Where it does not, it costs one line, or is refused if answers or
placement would be other than what was asked for. A switch of vLLM also comes with `--no-` before
its name.
"""


def page() -> str:
    parts = [HEAD]
    for peer, rules in PEERS.items():
        parts.append(f"\n## {peer}\n\n| typed | for | on Invar |\n|---|---|---|\n")
        parts += [row(rule) for rule in rules if not is_off(rule)]
    return "".join(parts)


def is_off(rule: Rule) -> bool:
    """The other side of a switch, which has a row already."""
    return rule.engine in {**INERT, **ABSENT} and rule.engine_value is False


def row(rule: Rule) -> str:
    typed = ", ".join(f"`{spelling}`" for spelling in rule.spellings)
    commands = "both" if rule.commands == BOTH else f"`{rule.commands[0]}`"
    return f"| {typed} | {commands} | {outcome(rule)} |\n"


def outcome(rule: Rule) -> str:
    if rule.option is not None:
        value = f" `{rule.prefix}…`" if rule.prefix else ""
        pairs = (f"`{theirs}` → `{ours}`" for theirs, ours in (rule.values or {}).items())
        return f"`{rule.option}`{value}" + (f" ({', '.join(pairs)})" if rule.values else "")
    if rule.engine is not None:
        if rule.engine in INERT:
            return "one notice: " + reason(*INERT[rule.engine])
        if rule.engine in ABSENT:
            return "refused: " + reason(*ABSENT[rule.engine])
        value = "" if rule.takes is not Takes.NOTHING else f" = {rule.engine_value}"
        return f"engine option `{rule.engine}`{value}"
    if rule.refusal is not None:
        return "refused: " + reason(rule.neutral, rule.refusal)
    return "one notice: " + reason(rule.neutral, rule.notice or "")


def reason(off: Iterable[object], text: str) -> str:
    """With the values that can be typed and ask for nothing."""
    silent = [f"`{value}`" for value in off if value not in (None, False, "", [], {})]
    return f"{text} (silent at {', '.join(silent)})" if silent else text


if __name__ == "__main__":
    print(page(), end="")
