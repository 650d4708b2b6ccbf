"""docs/cli_compat.md is what `python -m invar.cli.compat_page` prints."""

from __future__ import annotations

from invar.cli.compat import BOTH, PEERS, Rule, Takes

HEAD = """# The peers' flags on Invar

Made from the tables in `invar/cli/compat.py`; do not edit. Hyphens and underscores are the same in
long options. A flag that is in no table is an error that names the nearest known one.

"Engine option" means that the flag sets the option of that name; `invar/config.py` says whether it
does something on this backend. Where it does not, it costs one line, or is refused if answers or
placement would be other than what was asked for.
"""


def page() -> str:
    parts = [HEAD]
    for peer, rules in PEERS.items():
        parts.append(f"\n## {peer}\n\n| typed | for | on Invar |\n|---|---|---|\n")
        parts += [row(rule) for rule in rules]
    return "".join(parts)


def row(rule: Rule) -> str:
    typed = ", ".join(f"`{spelling}`" for spelling in rule.spellings)
    commands = "both" if rule.commands == BOTH else f"`{rule.commands[0]}`"
    return f"| {typed} | {commands} | {outcome(rule)} |\n"


def outcome(rule: Rule) -> str:
    if rule.option is not None:
        value = f" `{rule.prefix}…`" if rule.prefix else ""
        return f"`{rule.option}`{value}"
    if rule.engine is not None:
        value = "" if rule.takes is not Takes.NOTHING else f" = {rule.engine_value}"
        return f"engine option `{rule.engine}`{value}"
    what = f"refused: {rule.refusal}" if rule.refusal else f"one notice: {rule.notice}"
    if rule.neutral:
        what += f" (silent at {', '.join(f'`{value}`' for value in rule.neutral)})"
    return what


if __name__ == "__main__":
    print(page(), end="")
