"""Options that several commands share mean the same in all of them."""

from __future__ import annotations

from collections import defaultdict

from lowrank_cnn.cli.app import COMMANDS, load_command


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
