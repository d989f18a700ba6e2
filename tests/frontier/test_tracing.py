"""Plans carried out: the order, the controls and the resuming, with made-up runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowrank_cnn.choose import runs as training
from lowrank_cnn.choose import trace as timing
from lowrank_cnn.choose import trace as tracing
from lowrank_cnn.choose.candidates import Design, FrontierPlan
from lowrank_cnn.choose.frontier import ANSWERS, RECORD, DesignTime, load_frontier
from lowrank_cnn.choose.trace import trace_frontier
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data
from lowrank_cnn.train.failure import NotFiniteError

SMALL = {"batch_size": 32, "epochs": 1, "crop": 12}


taught: list[object] = []
"""The teachers of the runs that were made up."""


def quiet(_: str) -> None:
    pass


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Runs and times without any training: what was asked for is listed."""
    done: list[tuple] = []
    taught.clear()

    def train(
        self: training.DesignTrainer, design: Design, seed: int, *, rate: float = 1.0
    ) -> training.TrainedDesign:
        done.append((design.name, seed, rate))
        if design.name == "separable":
            raise NotFiniteError("the loss is not finite.")
        right = torch.arange(len(self.data.test)) % 4 != (seed if rate == 1 else 0)
        record = SimpleNamespace(result={"images_per_second": 64.0}, history=[{"train_accuracy": 0.5}])
        taught.append(self.teacher)
        return training.TrainedDesign(record, right, 2.0)  # type: ignore[arg-type]

    def time(self: timing.DesignClock, design: Design) -> DesignTime:
        done.append((design.name, "timed"))
        ms = design.width**2 * design.last * (1.0 if design.dense else 0.8 if design.where == "late" else 0.5)
        return DesignTime(ms, ms, ms, 1.0, self.batch, "folded")

    monkeypatch.setattr(training.DesignTrainer, "train", train)
    monkeypatch.setattr(timing.DesignClock, "time", time)
    return done


def test_every_design_gets_its_first_run_before_any_gets_a_second(tmp_path: Path, squares: Data, made_up: list):
    plan = FrontierPlan(("lr",), (0.75,), match=(), seeds=2, batch=0)
    trace_frontier("airbench", squares, tmp_path, plan, settings=SMALL, device="cpu", say=quiet)
    names = ["dense", "dense@0.75", "lr"]
    assert made_up == [(name, seed, 1.0) for seed in (1, 2) for name in names]


def test_what_is_done_is_not_done_again(tmp_path: Path, squares: Data, made_up: list, monkeypatch):
    plan = FrontierPlan(("lr",), match=(), seeds=2)
    how = {"settings": SMALL, "device": "cpu", "say": quiet}
    whole = training.DesignTrainer.train
    calls = []

    def cut(self, design, seed, *, rate=1.0):
        calls.append(seed)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(self, design, seed, rate=rate)

    monkeypatch.setattr(training.DesignTrainer, "train", cut)
    with pytest.raises(KeyboardInterrupt):
        trace_frontier("airbench", squares, tmp_path, plan, **how)
    assert sum(len(row.runs) for row in load_frontier(tmp_path).rows) == 2
    made_up.clear()
    monkeypatch.setattr(training.DesignTrainer, "train", whole)
    trace_frontier("airbench", squares, tmp_path, plan, **how)
    assert made_up == [("dense", 2, 1.0), ("lr", 2, 1.0)]
    made_up.clear()
    found = trace_frontier("airbench", squares, tmp_path, plan, **how)
    assert made_up == []
    assert [run.row for row in found.rows for run in row.runs] == [0, 2, 1, 3]


def test_controls_are_thin_dense_networks_of_equal_macs_and_equal_time(
    tmp_path: Path, squares: Data, made_up: list
):
    plan = FrontierPlan(("lr",), (0.5,), seeds=0)
    found = trace_frontier("airbench", squares, tmp_path, plan, settings=SMALL, device="cpu", say=quiet)
    rows = {row.design["matched"]: row for row in found.rows}
    low_rank, macs, time = rows[""], rows["macs of lr"], rows["time of lr"]
    assert low_rank.name == "lr"
    assert macs.macs == pytest.approx(low_rank.macs, rel=0.15)
    assert time.timing is not None
    assert time.timing.ratio == pytest.approx(0.5, rel=0.06)  # a width of 0.71


def test_controls_of_a_design_with_branches_have_branches(tmp_path: Path, squares: Data, made_up: list):
    plan = FrontierPlan(("lr-branches",), match=("macs",), seeds=0, batch=0)
    found = trace_frontier("airbench", squares, tmp_path, plan, settings=SMALL, device="cpu", say=quiet)
    control = found.rows[-1]
    assert control.name.startswith("dense-branches@")
    assert control.dense
    assert control.branched


@pytest.mark.nightly
def test_a_network_of_the_record_is_the_control_if_it_has_the_same_filters(
    tmp_path: Path, squares: Data, made_up: list
):
    how = {"settings": SMALL, "device": "cpu", "say": quiet}
    matched = FrontierPlan(("lr",), match=("macs",), seeds=1, batch=0)
    control = trace_frontier("airbench", squares, tmp_path / "one", matched, **how).rows[-1]
    near = FrontierPlan((), (control.design["width"] + 0.002,), match=(), seeds=0, batch=0)
    trace_frontier("airbench", squares, tmp_path / "two", near, **how)
    found = trace_frontier("airbench", squares, tmp_path / "two", matched, **how)
    same = [row for row in found.rows if (row.macs, row.params) == (control.macs, control.params)]
    assert [len(row.runs) for row in same] == [1]


def test_on_a_gpu_controls_of_equal_time_are_in_64s(tmp_path: Path, squares: Data, made_up: list, monkeypatch):
    opened = tracing.open_frontier
    monkeypatch.setattr(tracing, "open_frontier", lambda at, about, n: opened(at, {**about, "device": "cuda"}, n))
    plan = FrontierPlan(("lr",), match=("time",), seeds=0)
    found = trace_frontier("airbench", squares, tmp_path, plan, settings=SMALL, device="cpu", say=quiet)
    control = next(row for row in found.rows if row.design["matched"] == "time of lr")
    assert (control.name, control.design["multiple"]) == ("dense-64s@0.71875", 64)


def test_times_of_other_batches_are_refused(tmp_path: Path, squares: Data, made_up: list):
    how = {"settings": SMALL, "device": "cpu", "say": quiet}
    trace_frontier("airbench", squares, tmp_path, FrontierPlan(match=(), seeds=0, batch=8), **how)
    with pytest.raises(LowRankError, match="holds times of batches of 8 images, not 16: say --batch 8"):
        trace_frontier("airbench", squares, tmp_path, FrontierPlan(match=(), seeds=0, batch=16), **how)
    trace_frontier("airbench", squares, tmp_path, FrontierPlan(match=(), seeds=0, batch=0), **how)


def test_a_design_is_widened_to_the_dense_networks_cost(tmp_path: Path, squares: Data, made_up: list):
    plan = FrontierPlan(("lr",), widen=("macs", "time"), match=(), seeds=0)
    found = trace_frontier("airbench", squares, tmp_path, plan, settings=SMALL, device="cpu", say=quiet)
    rows = {row.design["matched"]: row for row in found.rows}
    assert rows["macs of dense"].macs == pytest.approx(found.rows[0].macs, rel=0.1)
    timed = rows["time of dense"].timing
    assert timed is not None
    assert timed.ratio == pytest.approx(1.0, rel=0.05)


def learned(folder: Path, shapes: str) -> str:
    folder.mkdir(parents=True)
    (folder / "shapes.json").write_text(f'{{"learned_shapes": {{"features.conv1_1": "exact({shapes})"}}}}')
    return f"shapes:{folder / 'shapes.json'}"


def test_learned_shapes_are_not_widened_and_keep_their_name(tmp_path: Path, squares: Data, made_up: list):
    first, other = learned(tmp_path / "a/run", "5x1=16, 1x5=32"), learned(tmp_path / "b/run", "3x1=16, 1x3=32")
    said: list[str] = []
    how = {"settings": SMALL, "device": "cpu", "say": said.append}

    def trace(design: str) -> list[str]:
        plan = FrontierPlan((design,), widen=("macs", "time"), match=(), seeds=0, base=0.25)
        return [row.name for row in trace_frontier("nin", squares, tmp_path / "out", plan, **how).rows]

    assert trace(first) == trace(first) == ["dense", "learned-run"]
    assert "learned-run has the widths that were learned, and is not widened." in said
    with pytest.raises(LowRankError, match=r"b/run/shapes.json has other shapes than learned-run of this record"):
        trace(other)


def test_a_design_with_runs_keeps_its_rate(tmp_path: Path, squares: Data, made_up: list):
    how = {"settings": SMALL, "device": "cpu", "say": quiet}
    trace_frontier("airbench", squares, tmp_path, FrontierPlan(match=(), seeds=1, batch=0), **how)
    made_up.clear()
    plan = FrontierPlan(("lr",), match=(), seeds=2, batch=0, rates=(2.0,))
    found = trace_frontier("airbench", squares, tmp_path, plan, **how)
    assert made_up == [("lr", 1000, 2.0), ("lr", 1, 2.0), ("dense", 2, 1.0), ("lr", 2, 2.0)]
    assert [row.rate for row in found.rows] == [1.0, 2.0]


def test_widths_of_equal_time_are_those_of_one_design(tmp_path: Path, squares: Data, made_up: list):
    """`lr` and `lr-late` have one scheme, and `dense-2x` is dense as well: their times are kept apart."""
    plan = FrontierPlan(("lr@2", "lr-late", "dense-2x"), widen=("time",), match=("time",), seeds=0)
    found = trace_frontier("airbench", squares, tmp_path, plan, settings=SMALL, device="cpu", say=quiet)
    assert {row.name for row in found.rows if row.design["matched"] == "time of dense"} == {
        "lr@1.40625",
        "lr-late@1.125",
        "dense-2x@0.71875",
    }
    assert {row.name for row in found.rows if row.design["matched"] == "time of lr-late"} == {"dense@0.90625"}


def test_settings_are_tried_alike_on_images_held_out(tmp_path: Path, squares: Data, made_up: list):
    plan = FrontierPlan(("lr",), match=(), seeds=1, batch=0, rates=(1.0, 2.0), tries=2)
    found = trace_frontier("airbench", squares, tmp_path, plan, settings=SMALL, device="cpu", say=quiet)
    tries = [(name, 1000 + place, rate) for name in ("dense", "lr") for rate in (1.0, 2.0) for place in (0, 1)]
    assert made_up[:8] == tries
    best = max(found.rows[0].tries, key=lambda one: sum(one.accuracies))
    assert [row.rate for row in found.rows] == [best.rate, best.rate]
    assert made_up[8:] == [("dense", 1, best.rate), ("lr", 1, best.rate)]


def test_a_record_of_tries_alone_names_its_machine(tmp_path: Path, squares: Data, made_up: list):
    plan = FrontierPlan((), match=(), seeds=0, batch=0, rates=(1.0,))
    found = trace_frontier("airbench", squares, tmp_path, plan, settings=SMALL, device="cpu", say=quiet)
    assert [one["torch"] for one in found.environments] == [torch.__version__]


def test_a_teacher_is_trained_first_and_teaches_dense_networks_too(tmp_path: Path, squares: Data, made_up: list):
    plan = FrontierPlan(("lr",), match=(), seeds=1, batch=0, base=0.25, teacher="dense@0.5")
    how = {"settings": SMALL, "device": "cpu", "say": quiet}
    trace_frontier("airbench", squares, tmp_path, plan, **how)
    assert made_up == [("dense", 1, 1.0), ("lr", 1, 1.0)]
    [network] = {teacher.network for teacher in taught}  # type: ignore[attr-defined]
    trace_frontier("airbench", squares, tmp_path, dataclasses.replace(plan, seeds=2), **how)
    later = taught[-1].network  # type: ignore[attr-defined]
    assert later is not network
    for name, value in later.state_dict().items():  # the teacher of the first runs
        assert torch.equal(value, network.state_dict()[name]), name
    with pytest.raises(LowRankError, match=r"whose teacher is dense@0\.5, not none"):
        trace_frontier("airbench", squares, tmp_path, FrontierPlan(batch=0, base=0.25), **how)


def test_a_run_whose_loss_is_not_finite_is_kept_in_mind(tmp_path: Path, squares: Data, made_up: list):
    plan = FrontierPlan(("separable",), match=(), seeds=1, batch=0)
    lines: list[str] = []
    for _ in range(2):
        found = trace_frontier("airbench", squares, tmp_path, plan, settings=SMALL, device="cpu", say=lines.append)
    assert found.rows[1].failed == [1]
    assert [name for name, *_ in made_up] == ["dense", "separable"]
    assert "2/2  separable seed 1: the loss was not finite; 0 s left" in lines


def test_nothing_is_begun_once_the_time_is_over(tmp_path: Path, squares: Data, made_up: list):
    lines: list[str] = []
    plan = FrontierPlan(("lr",), seeds=3, batch=0, match=(), budget=1e-9)
    trace_frontier("airbench", squares, tmp_path, plan, settings=SMALL, device="cpu", say=lines.append)
    assert made_up == []
    assert "goes on from here" in lines[-1]
    assert (tmp_path / RECORD).exists()


def test_another_recipe_is_refused_in_the_same_folder(tmp_path: Path, squares: Data, made_up: list):
    plan = FrontierPlan(match=(), seeds=0, batch=0)
    trace_frontier("airbench", squares, tmp_path, plan, settings=SMALL, device="cpu", say=quiet)
    with pytest.raises(LowRankError, match=r"whose recipe lr is 1\.5, not 3\.0"):
        trace_frontier("airbench", squares, tmp_path, plan, settings={**SMALL, "lr": 3}, device="cpu", say=quiet)


def test_a_family_that_is_not_there_is_refused(tmp_path: Path, squares: Data):
    with pytest.raises(LowRankError, match="no family 'airbensh'; did you mean airbench"):
        trace_frontier("airbensh", squares, tmp_path)


@pytest.mark.nightly
def test_runs_side_by_side_find_what_runs_alone_find(tmp_path: Path, squares: Data):
    plan = FrontierPlan(("lr",), match=(), seeds=1, batch=0, base=0.25, rates=(0.5, 1.0))
    how = {"settings": SMALL, "device": "cpu"}
    lines: list[str] = []
    beside = dataclasses.replace(plan, processes=2)
    both = trace_frontier("airbench", squares, tmp_path / "both", beside, say=lines.append, **how)
    alone = trace_frontier("airbench", squares, tmp_path / "alone", plan, say=quiet, **how)
    assert (tmp_path / "both" / ANSWERS).read_bytes() == (tmp_path / "alone" / ANSWERS).read_bytes()
    for ours, theirs in zip(both.rows, alone.rows, strict=True):
        assert (ours.rate, ours.tries) == (theirs.rate, theirs.tries)
        assert [run.sha256 for run in ours.runs] == [run.sha256 for run in theirs.runs]
        assert [(run.seconds, run.processes) for run in ours.runs] == [(None, 2)]
        assert all(run.seconds and run.processes == 1 for run in theirs.runs)
    assert lines[-1].startswith("2/2  lr seed 1: ")
    assert "beside others" in lines[-1]
    assert load_frontier(both.folder).rows == both.rows
