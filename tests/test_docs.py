"""README and docs: their tables are those that the records give, and all that they show runs, in its order.

What cannot run here is preceded by `<!-- not run: REASON -->`, and there is little of it.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.run
from PIL import Image

from lowrank_cnn.cli.app import COMMANDS, load_command, run
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.deploy.timing import time_model
from lowrank_cnn.models import list_models
from tests.support import ROOT, called_here, load_file

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_NOT_RUN = 16

SMALLER = {
    "demo": "--epochs 1 --limit 128",
    "compare": "--limit 16 --set epochs=1 --set batch_size=4 --minutes 0.01",
    "train": "--epochs 1 --batch-size 8 --limit 16",
    "evaluate": "--limit 16",
    "frontier": "--limit 64 --set epochs=1 --set batch_size=32 --set crop=12 --batch 0 --seeds 1"
    " --match none --no-compile",
    "time": "--repeats 3 --threads 1",
    "plan": "--threads 1 --repeats 3",
}
"""What is appended to a command to make it quick: of an option given twice, the last one counts."""

BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?"
    r"(?:^```python\n(?P<python>.*?)^```$|(?P<shell>(?:^ {4}\S[^\n]*\n(?:^ {8}[^\n]*\n)*)+))",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Shown:
    """Something that a page shows: Python, or one command; `reason` says why it is not run."""

    python: str = ""
    command: tuple[str, ...] = ()
    reason: str = ""


def shown(page: Path) -> Iterator[Shown]:
    for block in BLOCK.finditer(page.read_text()):
        reason = block["reason"] or ""
        if block["python"]:
            yield Shown(python=block["python"], reason=reason)
        for line in (block["shell"] or "").replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield Shown(command=tuple(words), reason=reason)


def open_few(*words: Any, limit: int = 64, **options: Any) -> Data:
    return open_data(*words, limit=min(limit, 64), **options)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder as the pages assume it: photographs of several sizes in class folders, and one more."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 4)):
        for name in ("beach", "city"):
            place = tmp_path / "photos" / split / name
            place.mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 255, (*draw.integers(60, 90, 2), 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{index}.jpg")
    Image.fromarray(draw.integers(0, 255, (80, 120, 3), dtype=np.uint8)).save(tmp_path / "holiday.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for cache in ("XDG_CACHE_HOME", "LOWRANK_CACHE"):
        monkeypatch.setenv(cache, str(tmp_path / "cache"))
    monkeypatch.setattr("lowrank_cnn.deploy.timing.time_model", partial(time_model, repeats=3))
    monkeypatch.setattr("lowrank_cnn.deploy.choose_engine.apart", called_here)
    monkeypatch.setattr("lowrank_cnn.cli.compare.WIDTH", 0.05)
    monkeypatch.setattr("lowrank_cnn.cli.compare.MINUTES", 0.01)
    comparing = import_module("lowrank_cnn.choose.comparing")
    monkeypatch.setattr(comparing, "LEVELS", comparing.LEVELS[-1:])
    monkeypatch.setattr(comparing.Comparing, "left", 0.0)  # one run of one epoch of each network
    monkeypatch.setattr("lowrank_cnn.models.filters.PIXELS", 64**2)
    for place in ("lowrank_cnn", "lowrank_cnn.train.inputs"):
        monkeypatch.setattr(f"{place}.open_data", open_few)
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="aot_eager"))  # Inductor starts a compiler
    before = set(sys.modules)
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)


def smaller(words: tuple[str, ...]) -> list[str]:
    """The words and what makes them quick; one of our networks is made narrow as well."""
    kind = next((kind for kind in SMALLER if kind in words), None)
    narrow = "--width 0.05" if kind in ("train", "time", "plan") and set(words) & set(list_models()) else ""
    return [*words, *shlex.split(f"{SMALLER.get(kind or '', '')} {narrow}")]


def run_ours(words: tuple[str, ...]) -> None:
    """In this process: torch takes longer to load than most commands to run."""
    assert not run(smaller(words)[1:]), shlex.join(words)
    for option, value in pairwise(words):
        assert option not in ("-o", "--out") or Path(value).exists(), f"{shlex.join(words)} wrote no {value}"


def run_processes(words: tuple[str, ...]) -> None:
    """Start our command in several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", *smaller(words)[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"


def check_processes(words: tuple[str, ...]) -> None:
    """Parse all words: processes of their own import torch for longer than all else takes, and run by night."""
    launch = torch.distributed.run.parse_args(list(words[1:]))
    if launch.module:
        name, *rest = launch.training_script_args
        assert load_command(name).make_context(name, rest).args == [], words
    else:
        assert Path(launch.training_script).exists(), words


def check_target(words: tuple[str, ...]) -> None:
    assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words


def check_extras(words: tuple[str, ...]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, extras in re.findall(r"^([\w-]+)\[([\w,-]+)\]$", "\n".join(words), re.MULTILINE):
        assert name == "lowrank-cnn"
        assert set(extras.split(",")) <= set(known), words


PROGRAMS: dict[str, Callable[[tuple[str, ...]], None]] = {
    "lowrank": run_ours,
    "torchrun": check_processes,
    "make": check_target,
    "pip": check_extras,
}


def run_python(text: str, page: Path, names: dict[str, object]) -> None:
    """A block that begins with the name of a file is that file too."""
    if file := re.match(r"# (\w+\.py)\n", text):
        Path(file[1]).write_text(text)
    exec(compile(text, str(page), "exec"), names)


BY_NIGHT = tuple(f"docs/{name}.md" for name in ("devices", "frontier", "index", "your-model"))
"""Pages that take longest: tests of engines and commands do the same, and index.md shows what README.md shows."""


def pages_to_run() -> Iterator[Any]:
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        if any(not item.reason for item in shown(page)):
            yield pytest.param(page, id=name, marks=[pytest.mark.nightly] if name in BY_NIGHT else [])


@pytest.mark.parametrize("page", pages_to_run())
def test_what_a_page_shows_runs_from_top_to_bottom(page: Path, folder: Path):
    names: dict[str, object] = {"__name__": "__docs__"}
    for item in shown(page):
        if item.reason:
            continue
        if item.python:
            run_python(item.python, page, names)
        elif "/" not in item.command[0]:  # else a listing of files
            assert item.command[0] in PROGRAMS, item.command
            PROGRAMS[item.command[0]](item.command)


@pytest.mark.parametrize("name", BY_NIGHT)
def test_what_such_a_page_shows_can_be_typed(name: str):
    for item in shown(ROOT / name):
        compile(item.python, name, "exec")
        if item.command[:1] == ("lowrank",):
            _, command, *words = item.command
            assert load_command(command).make_context(command, words).args == [], item.command


@pytest.mark.nightly
def test_a_command_of_several_processes_runs(folder: Path):
    found = [item.command for page in PAGES for item in shown(page) if not item.reason]
    commands = [words for words in found if words[:1] == ("torchrun",) and "lowrank_cnn" in words]
    assert commands
    for words in commands:
        run_processes(words)


def test_all_is_found_and_little_is_left_out():
    found = {page: list(shown(page)) for page in PAGES}
    left_out = [item for items in found.values() for item in items if item.reason]
    assert len(left_out) <= MOST_NOT_RUN
    for page, items in found.items():
        text = page.read_text()
        assert sum(bool(item.python) for item in items) == text.count("```python"), page
        commands = re.findall(r"^ {4}(?:lowrank|torchrun) ", text, re.MULTILINE)
        assert sum(item.command[:1] in (("lowrank",), ("torchrun",)) for item in items) == len(commands), page
        assert text.count("<!-- not run") == len(re.findall(r"<!-- not run: \S", text)), page


@pytest.mark.parametrize("script", ["blocks", "notebooks"])
def test_tables_are_those_of_the_records_and_notebooks_those_of_their_pages(script: str):
    assert load_file(f"docs/{script}.py").stale() == [], f"write them by `python docs/{script}.py`"


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_in_help_texts_can_be_typed(name: str):
    """They are parsed to the last option; the pages run commands like them."""
    command = load_command(name)
    for line in (command.help or "").splitlines():
        if line.strip().startswith("lowrank "):
            words = shlex.split(line)[2:]
            assert command.make_context(name, words).args == [], line
