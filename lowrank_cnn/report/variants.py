"""What sets one way of training apart from others, in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

WORDS: dict[str, Callable[[str], str]] = {
    "epochs": lambda value: f"{value} epochs",
    "norm": lambda value: "no norm" if value == "None" else f"{value} norm",
    "pool": lambda value: "max pool" if value == "None" else f"{value} pool",
    "begun_from": lambda value: f"begun from {value}",
    "init": lambda value: f"{value} init",
}
"""Settings that read better as a phrase than as name=value."""
ALWAYS = ("begun_from",)
"""Settings that no reader may miss."""


def differences(alike: Sequence[Mapping[str, str]]) -> list[str]:
    """For each of several settings that read alike: those in which it differs from the others, in words."""
    names = dict.fromkeys(name for settings in alike for name in settings)
    values = {name: {settings.get(name) for settings in alike} for name in names}
    differ = [name for name in names if name in ALWAYS or len(values[name]) > 1]
    return [", ".join(_phrase(name, s[name]) for name in differ if name in s) for s in alike]


def _phrase(name: str, value: str) -> str:
    return WORDS[name](value) if name in WORDS else f"{name}={value}"


def natural(value: str) -> tuple[str | int, ...]:
    """To sort by: 9 epochs come before 10."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", value))
