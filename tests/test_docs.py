"""README and docs: their tables are those that the records give, and their Python runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_tables_are_those_of_the_records():
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "blocks.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path):
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, str(page), "exec"), names)
    assert "```python" not in page.read_text() or "lr" in names


@pytest.fixture
def holiday(tmp_path: Path) -> Path:
    """A folder as README assumes it: photographs of several sizes in class folders, and one more."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 4)):
        for name in ("beach", "city"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 255, (*draw.integers(60, 90, 2), 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.jpg")
    Image.fromarray(draw.integers(0, 255, (80, 120, 3), dtype=np.uint8)).save(tmp_path / "holiday.jpg")
    return tmp_path


def commands(page: Path) -> list[str]:
    return re.findall(r"^    (lowrank [^#\n]+)", page.read_text(), re.MULTILINE)


SMALLER = {"--epochs 30": "--epochs 1 --batch-size 8", "--width 0.5": "--width 0.05"}
"""What makes the commands quick; they are run as written but for this."""


def test_the_commands_of_the_readme_run_in_their_order(holiday: Path):
    for line in commands(ROOT / "README.md"):
        for long, short in SMALLER.items():
            line = line.replace(long, short)
        command = [sys.executable, "-m", "lowrank_cnn", *shlex.split(line)[1:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=holiday, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}: {done.stderr}"
    assert (holiday / "report.html").exists()
