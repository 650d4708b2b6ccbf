"""Rewriting a typed command line to our own options, before it is parsed."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from invar.cli.compat import PEERS, Rule, Takes
from invar.weights.catalogue import KNOWN_MODELS

SWITCH_WORDS = frozenset({"on", "off", "auto", "true", "false", "enabled", "disabled", "0", "1"})
NEGATIVE_NUMBER = re.compile(r"-\.?\d")
ENGINE_OPTION = "--engine-option"


class CommandLineError(Exception):
    """What was typed cannot be understood; the text says what and what is near."""


@dataclass(frozen=True)
class Own:
    """One of our options: its first spelling, and whether a value follows."""

    name: str
    takes_value: bool


@dataclass
class Rewritten:
    argv: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    typed: dict[str, str] = field(default_factory=dict)  # engine option → flag that set it


def rewrite(command: str, typed: Sequence[str], own: Mapping[str, Own]) -> Rewritten:
    """``own``: our options of this command, by spelling."""
    rules = rules_of(command)
    result, words = Rewritten(), Words(typed)
    for word in words:
        if word == "--":
            result.argv += [word, *words]
        elif not is_option(word):
            result.argv.append(word)
        else:
            name, value = split(word)
            if name in rules:
                take_rule(name, value, rules[name], words, result)
            elif name in own:
                take_own(name, value, own[name], words, result)
            else:
                raise CommandLineError(unknown(command, name, [*own, *rules]))
    return result


def is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not NEGATIVE_NUMBER.match(word)


def split(word: str) -> tuple[str, str | None]:
    """Name and value of ``--name=value``; underscores are as good as hyphens."""
    name, equals, value = word.partition("=")
    if name.startswith("--"):
        name = name.replace("_", "-")
    return name, value if equals else None


def take_own(name: str, value: str | None, own: Own, words: Words, result: Rewritten) -> None:
    if own.takes_value:
        # `=` keeps a value that begins with a hyphen from being taken for an option.
        value = next_value(name, words) if value is None else value
        result.argv.append(f"{own.name}={value}")
    elif value is not None:
        raise CommandLineError(f"{name}: takes no value")
    else:
        result.argv.append(own.name)


def take_rule(name: str, value: str | None, rule: Rule, words: Words, result: Rewritten) -> None:
    if rule.takes is Takes.VALUE and value is None:
        value = next_value(name, words)
    elif rule.takes is Takes.SWITCH and value is None:
        value = peek_switch(name, words)
        if value is None and rule.option is not None:
            value = "on"
    if rule.option is not None:
        plain = value is None
        word = rule.option if plain else f"{rule.option}={rule.prefix}{meant(name, value, rule)}"
        if rule.values is not None:
            refuse_second(name, word, rule.option, result.argv)
        result.argv.append(word)
    elif rule.engine is not None:
        given = rule.engine_value if rule.takes is Takes.NOTHING else literal(value or "")
        result.argv.append(f"{ENGINE_OPTION}={rule.engine}={json.dumps(given)}")
        result.typed[rule.engine] = name
    elif value is None or value not in rule.neutral:
        typed = name if value is None else f"{name} {value[:60]}"
        if rule.refusal is not None:
            raise CommandLineError(f"{typed}: not supported: {rule.refusal}")
        result.notices.append(f"{typed} has nothing to do here: {rule.notice}")


def meant(name: str, value: str | None, rule: Rule) -> str | None:
    """The value in our words."""
    if rule.values is None:
        return value
    if value is None or value not in rule.values:
        known = ", ".join(rule.values)
        raise CommandLineError(f"{name} {(value or '')[:40]}: not supported; one of {known}")
    return rule.values[value]


def refuse_second(name: str, word: str, option: str, argv: Sequence[str]) -> None:
    """Two spellings of a peer that are one option here may not ask for two things."""
    for other in argv:
        if other.startswith(f"{option}=") and other != word:
            raise CommandLineError(f"{name}: asks for {word}, after {other}; it is one option here")


def next_value(name: str, words: Words) -> str:
    try:
        return next(words)
    except StopIteration:
        raise CommandLineError(f"{name}: a value must follow") from None


def peek_switch(name: str, words: Words) -> str | None:
    """The next word if it is one of a switch; it is looked at without being used up otherwise."""
    following = words.peek()
    if following is None or is_option(following) or may_be_model(following):
        return None
    if following not in SWITCH_WORDS:
        raise CommandLineError(f"{name} {following[:40]}: not one of auto, on, off")
    return next(words)


def may_be_model(word: str) -> bool:
    """Paths and addresses have one of the marks, but for a file or folder that is just here."""
    if word in SWITCH_WORDS:
        return False
    return word in KNOWN_MODELS or any(mark in word for mark in "/:.") or os.path.exists(word)


def literal(text: str) -> object:
    """A value as JSON where it is JSON (numbers, true, objects), else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def rules_of(command: str) -> dict[str, Rule]:
    return {
        spelling: rule
        for rules in PEERS.values()
        for rule in rules
        if command in rule.commands
        for spelling in rule.spellings
    }


def unknown(command: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; nearest: {near[0]}" if near else ""
    return f"{name[:80]}: unknown option{hint} (see invar {command} --help)"


class Words:
    """An iterator that can be looked ahead by one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self._next = 0

    def __iter__(self) -> Words:
        return self

    def __next__(self) -> str:
        word = self.peek()
        if word is None:
            raise StopIteration
        self._next += 1
        return word

    def peek(self) -> str | None:
        return self._words[self._next] if self._next < len(self._words) else None
