"""`compare` from end to end on images that take no time, and what it writes."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lowrank_cnn as lr
from lowrank_cnn.choose import runs
from lowrank_cnn.choose import target as targets
from lowrank_cnn.choose.candidates import DENSE, Builder
from lowrank_cnn.choose.frontier import DesignTime, kind_of, load_frontier
from lowrank_cnn.choose.target import Target
from lowrank_cnn.cli.app import build
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.train.trained import carried_by, load_checkpoint

answer, comparing = (import_module(f"lowrank_cnn.choose.{name}") for name in ("compare", "comparing"))
QUICK = {"epochs": 1, "batch_size": 16, "minutes": 60}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch):
    """One low-rank design, no tries of the learning rate, two runs; networks are timed as they are."""

    def as_is(model: nn.Module, images: torch.Tensor, **_: object) -> nn.Module:
        model.chosen = {"choice": "as is", "times": {"as is": 1.0}, "ways": {}}  # type: ignore[assignment]
        return model

    monkeypatch.setattr(targets, "optimize", as_is)
    monkeypatch.setattr(comparing, "LEVELS", ((1, (1.0,), 0.0),))
    monkeypatch.setattr(comparing, "FEWEST_RUNS", 2)
    monkeypatch.setattr(comparing, "MOST_RUNS", 2)


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowrank_cnn.report.write_report", lambda *_, **__: None)


def network() -> nn.Module:
    convs = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2)
    return nn.Sequential(convs[0], nn.BatchNorm2d(16), nn.ReLU(), convs[1], nn.ReLU(), *head)


def depthwise() -> nn.Module:
    layers = nn.Conv2d(1, 16, 1), nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))


def test_it_ends_in_a_sentence_a_picture_a_page_and_a_run_to_export(squares: Data, tmp_path: Path):
    said: list[str] = []
    made = network()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    found = lr.compare(made, squares, out=tmp_path / "choice", say=said.append, **QUICK)
    assert found.sentence.startswith("Take ")
    assert "95%" in found.sentence
    assert {row["kind"] for row in found.table} == {"dense", "thin", "low-rank"}
    assert str(found).endswith("\n".join([found.sentence, *found.remarks]))
    assert all(row["runs"] == 2 for row in found.table)
    assert "64 training images, 20 test images" in said[0]
    assert "minutes" in said[0]
    for path in (found.picture, found.page):
        assert path is not None
        assert path.stat().st_size > 1000
    assert found.sentence.split(":")[0] in found.page.read_text()
    row = next(row for row in found.table if row["network"] == found.choice.taken.name)
    winner = load_checkpoint(found.winner, network=network())
    assert lr.count(winner.network, (1, 12, 12)).macs / lr.count(made, (1, 12, 12)).macs == row["macs"]
    lr.export(winner, tmp_path / "net.onnx")
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())
    # Each run held out other images, and the test images were used once for each.
    record = load_frontier(found.folder)
    assert [[run.seed for run in one.runs] for one in record.rows if one.runs] == [[1, 2]] * 3
    assert all(run.held_out is not None for one in record.rows for run in one.runs)


@pytest.mark.usefixtures("no_page")
def test_it_says_so_if_no_network_has_learned(tmp_path: Path):
    noise = torch.randint(256, (100, 1, 12, 12), generator=torch.Generator().manual_seed(0)).byte()
    parts = (ResidentSplit.of(images, torch.arange(len(images)) % 2) for images in noise.split(64))
    found = lr.compare(network(), Data("noise", ("a", "b"), *parts), out=tmp_path / "choice", **QUICK)
    assert any("guessing" in told for told in found.remarks)


@pytest.mark.usefixtures("no_page")
def test_a_comparison_that_was_killed_goes_on(squares: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It keeps its plan, and trains nothing twice."""
    trained, fit = [], runs.fit

    def killed(*given, **options):
        if options["out"]:
            trained.append(options["out"])
        if len(trained) == 4:
            trained.pop()
            raise KeyboardInterrupt
        return fit(*given, **options)

    monkeypatch.setattr(runs, "fit", killed)
    with pytest.raises(KeyboardInterrupt):
        lr.compare(network, squares, out=tmp_path, say=str, **QUICK)
    before = load_frontier(tmp_path)
    monkeypatch.setattr(runs, "fit", lambda *a, **k: (k["out"] and trained.append(k["out"].name)) or fit(*a, **k))
    lr.compare(network, squares, out=tmp_path, say=str, **QUICK)
    after = load_frontier(tmp_path)
    assert len(trained) == len(set(trained)) == 6  # where nothing is left to plan, nothing is tried
    for key in ("epochs", "candidates", "finalists", "minutes"):
        assert before.about["plan"][key] == after.about["plan"][key]
    for then, now in zip(before.rows, after.rows, strict=True):
        assert now.runs[: len(then.runs)] == then.runs
        assert len(now.runs) == 2
    with pytest.raises(LowRankError, match="choose another out"):
        lr.compare(network, squares, out=tmp_path, say=str, **{**QUICK, "epochs": 3})


@pytest.mark.usefixtures("no_page")
def test_with_time_every_network_is_tried_with_the_same_rates(
    squares: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(comparing, "LEVELS", ((2, (0.5, 2.0), 0.0),))
    monkeypatch.setattr(comparing, "FINALISTS", 2)
    monkeypatch.setattr(comparing, "MOST_RUNS", 1)
    monkeypatch.setattr(comparing, "FEWEST_RUNS", 1)
    found = lr.compare(network, squares, out=tmp_path, say=str, at_most=1e6, **QUICK)
    rows = load_frontier(found.folder).rows
    assert len(rows) >= 4  # lr, mixture, and a thin one at least
    for row in rows:
        assert [(one.rate, len(one.accuracies)) for one in row.tries] == [(0.5, 1), (2.0, 1)]
        assert row.rate in (0.5, 2.0)
    assert sum(bool(row.runs) for row in rows) == 2
    assert {len(row.runs) for row in rows if row.runs} == {1}


@pytest.mark.usefixtures("no_page")
def test_depthwise_networks_are_compared_with_bands(
    squares: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(comparing, "MOST_RUNS", 1)
    found = lr.compare(depthwise, squares, out=tmp_path, say=str, **QUICK)
    assert "bands" in [row["network"] for row in found.table]


@pytest.mark.parametrize(
    ("low_rank", "time_of", "late", "width"),
    [
        (0.3, lambda width: width, False, 0.3125),  # narrower than that of its MACs
        (0.3, lambda width: 0.4 + width / 2, False, 0.5625),  # none is as fast: that of its MACs
        (0.65, lambda width: width, False, 0.65625),
        (0.65, lambda width: width, True, 0.5625),  # near enough
        (0.8, lambda width: width**4, True, 0.9375),  # 0.5625 takes 0.1: by far not
        (1.1, lambda width: width, False, 0.5625),  # the dense network is the next
    ],
)
def test_the_thin_rival_is_the_widest_that_is_as_fast(
    squares: Data,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    low_rank: float,
    time_of,
    late: bool,
    width: float,
):
    def timed(_self, design):
        ratio = low_rank if not design.dense else time_of(design.width)
        return DesignTime(ratio, ratio, ratio, 1.0, 1, "as is")

    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing.Comparing, "time", timed)
    monkeypatch.setattr(comparing.Comparing, "_late", late)
    monkeypatch.setattr(comparing.Comparing, "_try_all", stop)
    made = nn.Conv2d(1, 128, 3), nn.Conv2d(128, 128, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 2)
    with pytest.raises(KeyboardInterrupt):
        lr.compare(nn.Sequential(*made), squares, out=tmp_path, say=str, **QUICK)
    rows = load_frontier(tmp_path).rows
    assert {row.design.width for row in rows if kind_of(row) == "thin"} == {width}


def test_on_a_gpu_filters_come_in_32s_where_no_layer_gets_more_than_its_share():
    def multiple(first: int) -> int:
        """The multiple that the filters of a network come in whose first layer has so many."""

        def make() -> nn.Module:
            convs = nn.Conv2d(3, first, 3, padding=1), nn.Conv2d(first, 256, 3), nn.Conv2d(256, 256, 3)
            return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))

        asked = SimpleNamespace(builder=Builder(make, (3, 16, 16)), target=Target("cuda"))
        macs = asked.builder.count(DENSE).macs
        return comparing.Comparing._thin_of(asked, macs / 4)[0].multiple

    assert multiple(128) == 32
    assert multiple(32) == 16  # half of 32 filters are 16
    assert multiple(16) == 8


@pytest.mark.usefixtures("no_page")
def test_the_budget_is_kept(squares: Data, tmp_path: Path):
    said: list[str] = []
    found = lr.compare(network, squares, out=tmp_path, say=said.append, **{**QUICK, "minutes": 1e-4, "epochs": 9})
    assert [row["runs"] for row in found.table] == [1, 1, 1]  # one of each is the least that can be compared
    assert "The time is over after 1 run of each network." in said
    assert said[0].endswith("One epoch of three networks takes about 1 minute, more than minutes=0.0001.")
    assert "without the chance of other runs" in found.sentence
    assert any("minutes=" in remark for remark in found.remarks)


@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize(
    ("slow", "tried"), [("add", 0), ("_fit", 0), pytest.param("", 2, marks=pytest.mark.nightly)]
)
def test_what_takes_longer_than_planned_is_made_up_for(
    squares: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str, tried: int
):
    """On a GPU, kernels compiled for 2.5 of 2.6 minutes, and the tries began all the same."""
    now, said = [0.0], []
    monkeypatch.setattr(comparing, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + now[0]))
    monkeypatch.setattr(comparing, "LEVELS", ((2, (0.5, 2.0), 0.0),))
    counted: list[str] = []
    for what in ("add", "_fit"):
        first = getattr(comparing.Comparing, what)

        def late(self, *given, what=what, first=first, **options):
            counted.append(what)
            beyond = what == slow and (what == "add" or "short" in self.plan)
            now[0] += 100.0 if beyond else 0.0
            return first(self, *given, **options)

        monkeypatch.setattr(comparing.Comparing, what, late)
    found = lr.compare(network, squares, out=tmp_path, say=said.append, **{**QUICK, "minutes": 5})
    rows = load_frontier(found.folder).rows
    assert {len(row.tries) for row in rows} == {tried}
    assert any("no time to try learning rates" in line for line in said) == (tried == 0)
    assert found.sentence.startswith("Take ")
    assert counted.count("add") <= (4 if slow == "add" else 9)


def test_in_an_engine_answers_are_those_of_the_file(squares: Data, tmp_path: Path):
    made, target = network(), Target.parse("torchscript")
    lr.fit(made, squares, epochs=1, batch_size=16, progress=False)
    trained = carried_by(made)
    assert trained is not None
    deployed = target.deployed(trained, squares, tmp_path)
    assert deployed is not None
    assert not isinstance(deployed.network, nn.Sequential)
    assert torch.equal(target.answers(deployed, squares), Target().answers(trained, squares))
    (tmp_path / "net.ts").unlink()
    with pytest.raises(LowRankError):
        load_checkpoint(tmp_path / "net.ts", trusted=True)


@pytest.mark.nightly
@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize("where", ["onnxruntime:int8", "ncnn:fp16"])
def test_networks_are_compared_in_an_engine(squares: Data, tmp_path: Path, where: str):
    found = lr.compare(network, squares, out=tmp_path, say=str, for_=where, schemes=("lr",), **QUICK)
    assert found.sentence.startswith("Take ")
    assert (found.winner / f"net{Target.parse(where).suffix}").is_file()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"for_": "ncnn:int8"}, "ncnn runs in fp32, fp16"),
        ({"for_": "toaster"}, "a network runs on cpu or cuda"),
        ({"minutes": 0}, "minutes"),
        ({"at_least": 90}, "at_least"),
        ({"schemes": ("nonsense",)}, "neither a design nor a scheme"),
        ({"batch": 0}, "batch"),
    ],
)
def test_bad_wishes_are_refused(squares: Data, tmp_path: Path, options: dict, told: str):
    with pytest.raises(LowRankError, match=told):
        lr.compare(network, squares, out=tmp_path / "out", say=str, **{**QUICK, **options})
    assert not list(tmp_path.rglob("runs"))


def test_a_network_without_a_cheaper_version_is_refused(squares: Data, tmp_path: Path):
    flat = nn.Sequential(nn.Flatten(), nn.Linear(144, 2))
    with pytest.raises(LowRankError, match="there is no cheaper version of this network"):
        lr.compare(flat, squares, out=tmp_path, say=str, **QUICK)


def test_the_command_prints_the_answer(tmp_path: Path):
    (tmp_path / "mynet.py").write_text(
        "from torch import nn\n\n\ndef make(num_classes=10):\n    return nn.Sequential(nn.Conv2d(1, 16, 3, 4), "
        "nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, num_classes))\n"
    )
    words = [
        "--data",
        "digits",
        "--limit",
        "60",
        "--minutes",
        "0.01",
        "--set",
        "epochs=1",
        "-o",
        str(tmp_path / "o"),
    ]
    done = CliRunner().invoke(build(), ["compare", f"{tmp_path}/mynet.py:make", *words])
    assert done.exit_code == 0, done.output
    assert "Take " in done.output
    assert "To export:" in done.output
    # The command knows which network the weights of the winner go into.
    done = CliRunner().invoke(build(), ["export", str(tmp_path / "o" / "winner"), "-o", str(tmp_path / "net.pt2")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "net.pt2").is_file()


@pytest.mark.usefixtures("no_page")
def test_trained_networks_are_pruned_and_decomposed_and_learn_from_the_original(
    squares: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(comparing, "MOST_RUNS", 1)
    taught, fit = {}, runs.fit

    def noted(made, *given, **options):
        if options["out"]:
            taught[options["out"].name.rsplit("-", 1)[0]] = options["teacher"] is not None
        return fit(made, *given, **options)

    monkeypatch.setattr(runs, "fit", noted)
    found = lr.compare(network(), squares, out=tmp_path, say=str, pretrained=True, **QUICK)
    thin = next(row["network"] for row in found.table if row["kind"] == "thin").replace(" ", "-")
    assert taught == {"dense": False, "lr-join": True, thin: True}
    assert found.sentence.startswith("Take ")
