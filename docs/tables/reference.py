"""The reference pages: commands from the application itself, recipes from their table."""

from __future__ import annotations

import inspect
import re
from collections.abc import Container, Iterable
from itertools import chain
from typing import Any

from tables.form import markdown

from lowrank_cnn.cli.app import COMMANDS, load_command
from lowrank_cnn.train import RECIPES

SHARED = 3
"""An option of so many commands is described once, above them."""


def commands() -> str:
    """The options of many commands, then each command: its purpose, examples and own options."""
    every = {name: load_command(name) for name in COMMANDS}
    shared = _shared(every.values())
    parts, panel = ["Many commands have these:\n\n", *map(_item, shared.values())], ""
    for name, command in every.items():
        if COMMANDS[name].panel != panel:
            panel = COMMANDS[name].panel
            parts.append(f"\n## {panel}\n")
        parts.append(_command(name, command, shared))
    return "".join(parts)


def _shared(commands: Iterable[Any]) -> dict[str, Any]:
    """The options of many commands, by meaning, the most frequent first; a name has only one shared meaning."""
    found: dict[str, list[Any]] = {}
    for parameter in chain.from_iterable(command.params for command in commands):
        found.setdefault(parameter.help, []).append(parameter)
    frequent = [same for same in sorted(found.values(), key=len, reverse=True) if len(same) >= SHARED]
    by_name = {one.name: one for one, *_ in reversed(frequent) if one.name != "help"}
    return {one.help: one for one in reversed(by_name.values())}


def _command(name: str, command: Any, shared: Container[str]) -> str:
    summary, _, rest = inspect.cleandoc(command.help or "").replace("\b\n", "").partition("\n\n")
    text, _, examples = rest.partition("Examples:")
    shown = "\n".join(line.strip() for line in re.sub(r" \\\n +", " ", examples).splitlines() if line.strip())
    about = " ".join(f"{summary} {text}".split())
    own = [one for one in command.params if one.name != "help" and one.help not in shared]
    items = "".join(["\n", *map(_item, own)]) if own else ""
    return f"\n### lowrank {name}\n{_escaped(about)}\n\n```sh\n{shown}\n```\n{items}"


def _item(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    shown = ", ".join(f"`{name}`" if name.startswith("-") else f"`{name.upper()}`" for name in names)
    return f"- {shown}: {_escaped(parameter.help)}\n"


def _escaped(text: str) -> str:
    """Text for a cell: bars and stars are no Markdown, names in capitals no tags."""
    return re.sub(r"([|*<>])", r"\\\1", " ".join(text.split()))


def recipes() -> str:
    """The fields that differ between recipes, a recipe in each line."""
    rows: list[list[object]] = []
    for recipe in RECIPES.values():
        crop = f"{recipe.crop}" if recipe.crop else "whole image"
        extras = [
            word
            for word, used in (
                ("label smoothing", recipe.label_smoothing),
                ("cutout", recipe.cutout),
                ("moving average", recipe.ema),
                ("held-out images", recipe.holdout),
                ("lookahead", recipe.lookahead),
            )
            if used
        ]
        norm = recipe.norm or ""
        cells = [
            f"`{recipe.name}`",
            recipe.epochs,
            recipe.batch_size,
            f"{recipe.lr:g}",
        ]
        rows.append([*cells, recipe.schedule, crop, norm, ", ".join(extras)])
    columns = ["recipe", "epochs", "batch", "lr", "<schedule", "crop", "<norm", "<also"]
    return markdown(columns, rows)
