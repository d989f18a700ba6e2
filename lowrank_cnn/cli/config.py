"""`--config FILE`: options of a command and fields of a recipe from a TOML or JSON file, never code.

    model = "nin-c3-lr"
    data = "photos"
    image-size = 64

    [recipe]
    name = "modern"
    optimizer = "adamw"
    lr = 0.001

What is typed on the command line comes before what the file says. `recipe = "modern"` chooses a recipe as it is.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from lowrank_cnn.system.errors import LowRankError, nearest
from lowrank_cnn.system.files import read_text

_RECIPE = "lowrank_cnn.recipe"
_MOST_BYTES = 2**20


def _apply(context: typer.Context, value: Path | None) -> Path | None:
    if value is not None:
        values = read_config(value)
        recipe = values.pop("recipe", {})
        fields = {"name": recipe} if isinstance(recipe, str) else dict(recipe)
        if "name" in fields:  # the recipe that the other fields change, as --recipe says it
            values["recipe"] = fields.pop("name")
        context.meta[_RECIPE] = fields
        context.default_map = {**(context.default_map or {}), **_by_parameter(context.command, values, value)}
    return value


Config = Annotated[
    Path | None,
    typer.Option("--config", callback=_apply, is_eager=True, help="TOML or JSON file with these options."),
]


def read_config(path: Path) -> dict[str, Any]:
    """The options of a file, and under `recipe` the fields of one."""
    try:
        text = read_text(path, most=_MOST_BYTES)
        found = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except OSError as error:
        raise LowRankError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:  # of either format, and of text that is not UTF-8
        raise LowRankError(f"{path} is not TOML or JSON: {str(error).splitlines()[0]}.") from error
    if not isinstance(found, dict) or not isinstance(found.get("recipe", {}), dict | str):
        raise LowRankError(f"{path} is to hold options by name, and a table [recipe] with the fields of a recipe.")
    return found


def config_recipe(context: typer.Context) -> dict[str, Any]:
    """The fields of a recipe that the file of this command sets."""
    return dict(context.meta.get(_RECIPE, {}))


def _by_parameter(command: Any, values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Values by the names of the command's parameters; the file has them as they are typed."""
    named = {}
    for parameter in command.params:
        for option in (*parameter.opts, parameter.name or ""):
            named[option.lstrip("-").replace("-", "_")] = parameter.name
    given, several = {}, {parameter.name for parameter in command.params if getattr(parameter, "multiple", False)}
    for key, value in values.items():
        name = named.get(key.replace("-", "_"))
        if name is None or name == "config":
            raise LowRankError(f"{path} sets {key!r}, which is no option: {nearest(key, named)}")
        given[name] = [value] if name in several and not isinstance(value, list) else value
    return given
