"""The first process speaks for all; a function called in a process of its own gives its result, or a sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.processes import apart, first_process


def test_one_process_and_the_first_of_several_speak(monkeypatch):
    assert first_process()
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert first_process() is (rank == "0")


OWN = """
import os

def add(a, b):
    os.write(1, b"an engine prints about itself")
    return a + b, os.getpid()

def fail():
    raise ValueError("no such layer")

def die():
    os._exit(3)
"""


def test_a_function_of_a_file_is_called_in_a_process_of_its_own(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    (added, process), (_, another) = apart(str(file), "add", [1], [2]), apart(str(file), "add", 1, 2)
    assert added == [1, 2]
    assert len({process, another, os.getpid()}) == 3
    for function, told in {"fail": "no such layer", "die": "without a result .exit status 3"}.items():
        with pytest.raises(LowRankError, match=told):
            apart(str(file), function)
