"""The reference pages: commands from the application itself, recipes from their table."""

from __future__ import annotations

import inspect
import re
from typing import Any

from tables.form import markdown

from lowrank_cnn.cli.app import COMMANDS, load_command
from lowrank_cnn.train import RECIPES

_LEFT = ("model", "models")


def commands() -> str:
    """Every command by panel: what it does, examples, arguments and options."""
    parts, panel = [], ""
    for name, entry in COMMANDS.items():
        if entry.panel != panel:
            panel = entry.panel
            parts.append(f"\n## {panel}\n")
        parts.append(_command(name))
    return "".join(parts).lstrip("\n")


def _command(name: str) -> str:
    command: Any = load_command(name)
    summary, _, rest = inspect.cleandoc(command.help or "").partition("\n\n")
    text, _, examples = rest.partition("Examples:")
    shown = "\n".join(line.strip() for line in re.sub(r" \\\n +", " ", examples).splitlines() if line.strip())
    about = " ".join(f"{summary} {text}".split())
    rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
    table = markdown(["option", "<default", "<meaning"], rows)
    return f"\n### lowrank {name}\n{_escaped(about)}\n\n```sh\n{shown}\n```\n\n{table}"


def _row(parameter: Any) -> list[object]:
    names = [*parameter.opts, *parameter.secondary_opts]
    argument = not names[0].startswith("-")
    shown = f"`{names[0].upper()}`" if argument else ", ".join(f"`{name}`" for name in names)
    default = parameter.default
    empty = default is None or default is False or callable(default) or default in ((), [])
    stated = "required" if parameter.required else "" if empty else f"`{default}`"
    return [shown, stated, _escaped(parameter.help)]


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
            f"{recipe.weight_decay:g}",
        ]
        rows.append([*cells, recipe.schedule, crop, norm, ", ".join(extras)])
    columns = ["recipe", "epochs", "batch", "lr", "weight decay", "<schedule", "crop", "<norm", "<also"]
    return markdown(columns, rows)
