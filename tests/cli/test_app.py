"""Help, completion, what is printed, and how a command ends: exit codes, signals, closed pipes."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from lowrank_cnn import cli
from lowrank_cnn.cli import app
from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.core.errors import LowRankWarning
from lowrank_cnn.train import Interrupted, load_record

ROOT = Path(__file__).parents[2]
TRAIN = ("train", "nin-c3-lr", "--data", "digits", "--recipe", "digits", "--width", "0.1", "--device", "cpu")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lowrank_cnn", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT, **options}
    return subprocess.Popen(command, **options)


def test_usage_errors_are_shown_with_code_two(capsys):
    assert app.run(["nonsense"]) == 2
    assert "No such command" in capsys.readouterr().err
    assert app.run(["--version"]) == 0


def test_help_of_every_command_is_shown_without_torch():
    """One process for all of them: torch alone takes longer to import than all help texts to print."""
    code = "import sys; from lowrank_cnn.cli import app\n"
    code += "codes = [app.run([*name, '-h']) for name in [[], *[[n] for n in app.COMMANDS]]]\n"
    code += "print(set(codes), app.run(['--version']), 'torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert done.stdout.endswith("\n{0} 0 False False\n"), done.stdout[-300:] + done.stderr


def test_alone_it_shows_what_it_can_do(capsys):
    assert app.run([]) == 0
    shown = capsys.readouterr().out
    words = {*app.COMMANDS, "Start:", "Train:", "Convert:", "Deploy:", "Paper:"}
    assert words <= set(shown.split())


@pytest.mark.parametrize("name", app.COMMANDS)
def test_help_begins_with_the_line_of_the_list_and_has_examples(name: str):
    command = app.load_command(name)
    first, *rest = inspect.cleandoc(command.help or "").splitlines()
    assert first == app.COMMANDS[name].summary
    assert sum(line.startswith(f"  lowrank {name}") for line in rest) >= 2
    examples = [line for line in rest if line.startswith("  ")]
    assert all(line.startswith(f"  lowrank {name}") and len(line) <= 76 for line in examples)
    assert all("-o" in option.opts for option in command.params if "--out" in option.opts)


def test_help_is_short_and_nothing_in_it_is_cut_in_sixty_columns(monkeypatch, capsys):
    app.run(["train", "--help"])
    assert len(capsys.readouterr().out.splitlines()) <= 60
    monkeypatch.setenv("COLUMNS", "60")
    for name in app.COMMANDS:
        app.run([name, "--help"])
        lines = capsys.readouterr().out.splitlines()
        assert max(len(line) for line in lines if not line.startswith("    lowrank ")) <= 60
        assert not any(sign in line for sign in ("<bool>", "\N{HORIZONTAL ELLIPSIS}") for line in lines)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("lowrank re", "reproduce"), ("lowrank train --val", "--val-split"), ("lowrank plan --dev", "--device")],
)
def test_the_shell_completes_commands_and_options(typed: str, offered: str):
    words = {"_LOWRANK_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    code = "import sys; sys.argv[0] = 'lowrank'; from lowrank_cnn.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT | words, check=False
    )
    assert offered in done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3])
def test_ctrl_c_is_answered_from_the_first_moment(delay):
    code = "import lowrank_cnn.cli as cli; handle = cli.CTRL_C.handle\n"
    code += "cli.CTRL_C.handle = lambda: (handle(), print('ready', flush=True)); cli.main()"
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", code, "audit"], stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in complaints


def run_interrupted(tmp_path: Path, code: str, *, library: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command made of this code, which presses Ctrl-C by `press()` or by `import library`."""
    (tmp_path / "library.py").write_text("from press import press\n" + library)
    (tmp_path / "press.py").write_text("import signal\npress = lambda: signal.raise_signal(signal.SIGINT)")
    body = "".join(f"    {line}\n" for line in inspect.cleandoc(code).splitlines())
    script = (
        "import time, typer, lowrank_cnn.cli as cli\nfrom lowrank_cnn.cli import app\nfrom press import press\n"
        f"from lowrank_cnn.core.errors import LowRankError\ndef command(**_):\n{body}"
        "app.build = lambda: command\ncli.GRACE_SECONDS = 0.2\ncli.main()\n"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join((ENVIRONMENT.get("PYTHONPATH", ""), str(tmp_path)))}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=600, check=False
    )


@pytest.mark.parametrize(
    "code",
    [
        "press()",
        "try: press()\nexcept KeyboardInterrupt: raise LowRankError('a library made an error of it')",
        "try: press()\nexcept KeyboardInterrupt: raise RecursionError('a library made an error of it')",
        "try: press()\nexcept KeyboardInterrupt: pass",
        "try: press()\nexcept KeyboardInterrupt: time.sleep(5000)",
        "try: press()\nexcept KeyboardInterrupt: press()",
        "import library\nprint('went on')",
    ],
)
def test_ctrl_c_ends_the_command_though_a_library_catches_it(tmp_path, code):
    done = run_interrupted(tmp_path, code, library="try: press()\nexcept BaseException: pass")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_that_the_caller_ignores_stays_ignored():
    script = (
        "import signal, lowrank_cnn.cli as cli; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "cli.CTRL_C.handle(); signal.raise_signal(signal.SIGINT); print('went on')"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout == "went on\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_every_command_that_trains_exits_by_the_signal(monkeypatch, capsys, number, code):
    def stop(**_: object) -> None:
        stopped = Interrupted("Stopped and saved.")
        stopped.signal = number
        raise stopped

    monkeypatch.setattr("lowrank_cnn.compare", lambda *_, **__: stop())
    assert app.run(["demo"]) == code
    assert capsys.readouterr().err == "Stopped and saved: the same command continues from here.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written_is_said():
    with Path("/dev/full").open("w") as full:
        process = start("--version", stdout=full)
        _, complaints = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "could not be written: No space left" in complaints


@pytest.mark.parametrize(("signals", "code"), [([signal.SIGTERM], 143), ([signal.SIGINT, signal.SIGINT], 130)])
def test_training_outlives_its_reader_and_ends_by_signals_without_a_traceback(
    tmp_path, monkeypatch, forked, signals, code
):
    more = ("--epochs", 1000, "--limit", 128, "--set", "checkpoint_every=0.1", "--out", tmp_path)
    monkeypatch.setattr(sys, "argv", ["lowrank", *map(str, (*TRAIN, *more))])
    monkeypatch.setattr(cli, "CTRL_C", cli.CtrlC())
    process = forked(cli.main)
    process.stdout.readline()
    process.stdout.close()
    while not (tmp_path / "record.json").exists() or len(load_record(tmp_path).history) < 2:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.05)
    complaints = process.stderr.read()
    assert process.wait() == code, complaints
    assert "Traceback" not in complaints
    if code == 143:
        assert "--resume" in complaints
        assert load_record(tmp_path).status == "interrupted"


def test_streams_are_put_back_and_warnings_printed_once_without_a_place(capsys):
    before = sys.stdout, sys.stderr
    with app.lasting_output(), app.plain_warnings():
        print("shown")
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn("val is not used.", LowRankWarning, stacklevel=1)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("shown\n", "val is not used.\n")


def test_names_do_not_control_the_terminal(capsys):
    console.print("\x1b[2Jcat", markup=False)
    print_table("\x1b]0;title\x07", ["class"], [["\x9b2J"]])
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x9b"} & set(shown)
    assert "\\x1b[2Jcat" in shown


def test_tables_align_numbers_show_markup_as_it_is_and_have_a_title_of_any_width(capsys):
    print_table(
        "A title that is wider than all columns", ("name", "n", "<note"), [("[b]a", 5, "x"), ("b", 12345, None)]
    )
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "A title that is wider than all columns"
    assert {" [b]a     5 x", " b    12345"} <= set(lines)
    print_json({"a": [1, 2]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, 2]}
