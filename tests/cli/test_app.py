"""Every way in which a command ends: exit codes, signals, closed pipes, and one sentence for bad input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from lowrank_cnn.cli import app
from lowrank_cnn.cli.show import console, print_table
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.train import load_record

ROOT = Path(__file__).parents[2]
TRAIN = ("train", "nin-c3-lr", "--data", "digits", "--recipe", "digits", "--width", "0.1", "--device", "cpu")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lowrank_cnn", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT, **options}
    return subprocess.Popen(command, **options)


def ending_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command that raises this."""

    def build() -> typer.Typer:
        built = typer.Typer()

        @built.command()
        def fail() -> None:
            raise error

        return built

    monkeypatch.setattr(app, "build", build)
    return app.run([])


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (LowRankError("this is wrong: do that."), 2, "lowrank: this is wrong: do that."),
        (
            FileNotFoundError(2, "No such file or directory", "there"),
            2,
            "lowrank: there: No such file or directory.",
        ),
        (MemoryError(), 2, "not enough memory"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Exit(143), 143, ""),
    ],
)
def test_how_a_command_ends(error, code, told, monkeypatch, capsys):
    assert ending_with(error, monkeypatch) == code
    assert told in capsys.readouterr().err


def test_a_fault_of_ours_is_not_hidden(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        ending_with(ZeroDivisionError(), monkeypatch)


def test_usage_errors_are_shown_with_code_two(capsys):
    assert app.run(["nonsense"]) == 2
    assert "No such command" in capsys.readouterr().err
    assert app.run(["--version"]) == 0


def test_names_do_not_control_the_terminal(capsys):
    console.print("\x1b[2Jcat", markup=False)
    print_table("\x1b]0;title\x07", ["class"], [["\x9b2J"]])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert "\\x1b[2Jcat" in shown


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3])
def test_ctrl_c_is_answered_from_the_first_moment(delay):
    code = "import lowrank_cnn.cli as cli; print('ready', flush=True); cli.main()"
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", code, "audit"], stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in complaints


def test_a_reader_that_leaves_does_not_stop_the_training(tmp_path):
    process = start(*TRAIN, "--epochs", 2, "--limit", 128, "--out", tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(300) == 0, process.stderr.read() if process.stderr else ""
    assert load_record(tmp_path).status == "finished"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written_is_said():
    with Path("/dev/full").open("w") as full:
        process = start("models", stdout=full)
        _, complaints = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "could not be written: No space left" in complaints


def test_sigterm_saves_and_ends_with_143(tmp_path):
    process = start(*TRAIN, "--epochs", 1000, "--limit", 128, "--out", tmp_path)
    assert process.stdout is not None
    while "epoch 1/" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, complaints = process.communicate(timeout=300)
    assert process.returncode == 143
    assert "--resume" in complaints
    assert load_record(tmp_path).status == "interrupted"
