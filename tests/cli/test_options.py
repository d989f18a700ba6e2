"""Options that several commands share mean the same in all of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from lowrank_cnn.cli.app import COMMANDS, load_command, run
from lowrank_cnn.cli.options import SourceOptions, grouped


@dataclass(frozen=True)
class PaintOptions:
    colour: Annotated[str, typer.Option(help="A colour.")] = "red"
    coats: Annotated[int, typer.Option("--coats", "-c", min=1, help="How often.")] = 1


def test_fields_of_a_group_are_options_of_the_command():
    seen = []
    app = typer.Typer()

    @app.command()
    @grouped
    def paint(wall: str, how: PaintOptions, dry: bool = False) -> None:
        seen.append((wall, how, dry))

    assert CliRunner().invoke(app, ["north", "-c", "2", "--dry"]).exit_code == 0
    assert CliRunner().invoke(app, ["south", "--colour", "blue"]).exit_code == 0
    assert CliRunner().invoke(app, ["west", "--coats", "0"]).exit_code == 2
    assert seen == [("north", PaintOptions("red", 2), True), ("south", PaintOptions("blue", 1), False)]


@pytest.mark.parametrize("command", ["time", "plan", "design", "optimize"])
def test_a_batch_without_images_is_refused(command, capsys):
    assert run([command, "nin", "--batch", "0"]) == 2
    assert "--batch" in capsys.readouterr().err


def test_a_shared_option_has_one_default():
    defaults: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for command in COMMANDS:
        for parameter in load_command(command).params:
            defaults[parameter.opts[0], parameter.help][command] = repr(parameter.default)
    for option, by_command in defaults.items():
        assert len(set(by_command.values())) == 1, (option, by_command)


def test_every_command_that_computes_finds_the_device_itself():
    found = {
        command: parameter.default
        for command in COMMANDS
        for parameter in load_command(command).params
        if parameter.name == "device"
    }
    assert {"train", "evaluate", "predict", "time", "plan", "demo", "reproduce", "frontier"} <= set(found)
    assert set(found.values()) == {"auto"}


def test_every_option_is_explained():
    for command in COMMANDS:
        for parameter in load_command(command).params:
            assert parameter.help, (command, parameter.name)


def test_a_network_is_named_as_it_is_typed():
    named = SourceOptions(input_text="3x48x48", width=0.5)
    typed = named.words("my net.py:make", scheme="mixture(kx1=1, 1xk=1)")
    assert typed == "'my net.py:make' --input 3x48x48 --scheme 'mixture(kx1=1, 1xk=1)' --width 0.5"
