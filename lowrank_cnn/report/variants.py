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


def difference(settings: Mapping[str, str], alike: Sequence[Mapping[str, str]]) -> str:
    """The settings in which one of several that read alike differs from the others, and what is always told."""
    names = dict.fromkeys(name for other in alike for name in other)
    differ = [name for name in names if name in ALWAYS or len({other.get(name) for other in alike}) > 1]
    return ", ".join(_phrase(name, settings[name]) for name in differ if name in settings)


def _phrase(name: str, value: str) -> str:
    return WORDS[name](value) if name in WORDS else f"{name}={value}"


def natural(value: str) -> tuple[str | int, ...]:
    """To sort by: 9 epochs come before 10."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", value))
