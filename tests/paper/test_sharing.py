"""Processes that share the runs of an experiment among themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

from lowrank_cnn.data import open_data
from lowrank_cnn.paper import experiments
from lowrank_cnn.paper.experiments import ExperimentPart
from lowrank_cnn.paper.reproducing import reproduce
from lowrank_cnn.paper.sharing import held

SMALL = {"width": 0.0625, "epochs": 1, "crop": 28, "pad": 0, "mirror": False, "batch_size": 32}


@pytest.fixture
def miniature(monkeypatch):
    part = ExperimentPart(("nin",), "modern", {"": SMALL}, seeds=2)
    monkeypatch.setitem(experiments.EXPERIMENTS, "miniature", {"plain": part})


def run(out: Path) -> list[str]:
    said: list[str] = []
    data = open_data("digits", limit=120)
    reproduce("miniature", data, out, say=said.append, device="cpu", progress=False)
    return said


def test_a_directory_is_held_by_one_at_a_time(tmp_path):
    with held(tmp_path) as first, held(tmp_path) as second:
        assert first
        assert not second
    with held(tmp_path) as again:
        assert again


def test_a_lock_goes_with_the_process_that_held_it(tmp_path):
    code = (
        "import sys, time, pathlib\n"
        "from lowrank_cnn.paper.sharing import held\n"
        "with held(pathlib.Path(sys.argv[1])) as ours: print(ours, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    with held(tmp_path) as ours:
        assert not ours
    process.kill()
    process.wait()
    with held(tmp_path) as ours:
        assert ours


def test_runs_that_another_process_holds_are_left_to_it(miniature, tmp_path):
    with held(tmp_path / "plain" / "nin-seed1"):
        said = run(tmp_path)
    assert [line for line in said if "seed 1" in line] == []
    assert not (tmp_path / "plain" / "nin-seed1" / "record.json").exists()
    assert (tmp_path / "plain" / "nin-seed2" / "record.json").exists()
    assert any("seed 1" in line for line in run(tmp_path))


def test_ranks_of_one_run_hold_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with held(tmp_path) as first, held(tmp_path) as second:
        assert first
        assert second
