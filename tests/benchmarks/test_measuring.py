"""Benchmarks that measure, in miniature: engines, loaders, memory, gradients, kernels, and the zoo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from benchmarks import cpu_engines, depth_flow, input_pipeline, int8_accuracy, loaders, memory, training_profile
from lowrank_cnn.core import clock
from lowrank_cnn.data import open_data
from lowrank_cnn.models import create_model
from lowrank_cnn.train import fit


def row(engine: str, ms: float, network: str = "dense") -> dict[str, object]:
    return {"family": "nin", "precision": "fp32", "threads": 2, "network": network, "engine": engine, "ms": ms}


def test_rows_are_added_and_replaced(tmp_path):
    path = tmp_path / "record.json"
    cpu_engines.add(path, [row("ncnn", 3.0), row("mnn", 2.0)])
    cpu_engines.add(path, [row("ncnn", 1.0)])
    rows = cpu_engines.recorded(path)
    assert [(each["engine"], each["ms"]) for each in rows] == [("mnn", 2.0), ("ncnn", 1.0)]
    assert cpu_engines.best(rows, network="dense", precision="fp32") == row("ncnn", 1.0)
    assert cpu_engines.best(rows, network="thin") is None


@pytest.mark.nightly
def test_the_thin_network_has_the_macs_of_the_low_rank_one():
    size = cpu_engines.size_of("nin")
    macs = {way: lr.count(cpu_engines.network("nin", way), size).macs for way in cpu_engines.WAYS}
    assert macs["thin"] == pytest.approx(macs["low-rank"], rel=0.1)
    assert macs["low-rank"] < 0.6 * macs["dense"]


def test_the_interval_counts_images_that_only_one_answers():
    before, after = torch.ones(1000, dtype=torch.bool), torch.ones(1000, dtype=torch.bool)
    after[:10] = False
    found = int8_accuracy.paired(before, after)
    assert (found["n"], found["only_float"], found["only_int8"]) == (1000, 10, 0)
    assert found["loss"] == pytest.approx(1.0)
    assert found["low"] < 1.0 < found["high"]
    assert 0.3 < found["low"] < 0.5


def test_an_engine_that_uses_more_threads_than_it_was_given_is_refused():
    assert cpu_engines.refusal(1, own=1.78, others=0.01) == "it used 1.78 cores for 1 threads"
    assert cpu_engines.refusal(2, own=1.78, others=0.01) == ""
    assert cpu_engines.refusal(2, own=1.78, others=0.5) == "others used 0.50 cores"


def test_fast_networks_warm_up_as_long_as_slow_ones(monkeypatch):
    seconds: list[float] = []
    monkeypatch.setattr(clock, "_mark", lambda _: sum(seconds))
    runs = {"slow": lambda: seconds.append(0.1), "fast": lambda: seconds.append(0.002)}
    assert cpu_engines.warm_runs({"slow": runs["slow"]}) == 2
    assert cpu_engines.warm_runs(runs) == 15


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The record of a run over a few small photographs, into a file that has an entry of another machine."""
    out = tmp_path_factory.mktemp("loaders") / "loaders.json"
    out.write_text(json.dumps({"machines": [{"environment": {"cpu": "another", "gpu": None}}]}))
    words = ["--images", "8", "--photographs", "2", "--batch", "2", "--repeats", "1", "--workers", "0"]
    words += ["--seconds", "0.1", "--network", "nin-c3-lr", "--device", "cpu", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("CROP", 32), ("SIDE", 37), ("WIDTH", 64), ("HEIGHT", 48)):
            patch.setattr(loaders, name, value)
        patch.setattr(sys, "argv", ["loaders", *words])
        loaders.main()
    return json.loads(out.read_text())


def test_every_way_has_its_rate_and_idle_share(measured):
    other, machine = measured["machines"]
    assert other["environment"]["cpu"] == "another"
    assert machine["rows"].keys() == {"full size", "held as bytes", "held as floats"}
    for row in machine["rows"].values():
        assert row["lowest"] <= row["images_per_second"] <= row["highest"]
        assert row["seconds_before"] >= 0
        assert 0 <= row["idle"] < 1


@pytest.mark.nightly
def test_a_step_is_the_sum_of_its_kernels():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    found = training_profile.profiled(net, 4, size=(3, 8, 8), steps=2, classes=3)
    calls = {kernel["name"]: kernel["calls"] for kernel in found["kernels"]}
    assert sum(count for name, count in calls.items() if "convolution" in name) >= 2  # forward and backward
    assert 0 < sum(kernel["ms"] for kernel in found["kernels"]) <= found["ms"] * 1.001


def batches(n: int = 2):
    draw = torch.Generator().manual_seed(0)
    return ((torch.randn(8, 3, 32, 32, generator=draw), torch.arange(8) % 4) for _ in range(n))


def network(name: str, **options):
    torch.manual_seed(0)
    return create_model(name, num_classes=4, width=0.125, dropout=0.0, **options)


def test_a_group_that_answers_nothing_is_named():
    net = network("vgg11-gmp-lr")
    with torch.no_grad():
        net.features.conv3_1.weights[1].zero_()
    row = depth_flow.examined("net", net, batches())
    assert row["dead_groups"] == ["features.conv3_1 1x3"]
    assert row["dead"]["features.conv3_1"]["groups"]["1x3"] == [16, 16]
    assert row["worst_group"] == ["features.conv3_1 1x3", 1.0]


@pytest.mark.nightly
def test_a_run_can_be_examined(tmp_path, monkeypatch):
    torch.manual_seed(0)
    net = create_model("nin-c3-lr", num_classes=10, in_channels=1, width=0.0625, norm="batch")
    fit(
        net, open_data("digits", limit=200), "digits", epochs=1, out=tmp_path / "run", device="cpu", progress=False
    )
    arguments = ["--data", "digits", "--networks", "--run", tmp_path / "run", "--out", tmp_path / "flow.json"]
    monkeypatch.setattr(sys, "argv", ["depth_flow.py", *map(str, arguments), "--images", "100", "--device", "cpu"])
    depth_flow.main()
    (row,) = json.loads((tmp_path / "flow.json").read_text())["rows"]
    assert row["network"].endswith("/run")
    assert row["dead"]["features.conv1_1"]["groups"].keys() == {"3x1", "1x3"}


def memory_record(monkeypatch, out, *words):
    monkeypatch.setattr(sys, "argv", ["memory.py", "--part", "kept", "--out", str(out), *words])
    memory.main()
    return json.loads(out.read_text())


@pytest.mark.nightly
def test_the_maps_of_a_forward_pass_are_counted(tmp_path, monkeypatch):
    words = ["--networks", "vgg11-gmp", "--images", "32"]
    record = memory_record(monkeypatch, tmp_path / "memory.json", *words)
    (kept,) = (row["kept_bytes_per_image"] for row in record["kept"]["rows"])
    # Filters, sides and convs of the stages; a pool keeps its output and the places of maxima.
    stages = [(64, 32, 1), (128, 16, 1), (256, 8, 2), (512, 4, 2), (512, 2, 2)]
    maps = sum(4 * n * side**2 * convs for n, side, convs in stages) + 4 * 3 * 32**2
    ends = [n * (side // 2) ** 2 for n, side, _ in stages[:-1]]
    head = 4 * (512 + 6 * 4096)
    assert kept == pytest.approx(maps + 12 * sum(ends) + head, rel=0.02)


@pytest.mark.nightly
def test_a_record_keeps_what_other_processors_gave(write_shards, photo, tmp_path, monkeypatch):
    rows = [(photo(number, size=(64, 64)), 0) for number in range(48)]
    write_shards(tmp_path, "train", [rows[:2]])
    write_shards(tmp_path, "test", [rows])
    other = {"environment": {"cpu": "another"}, "rows": {}}
    (tmp_path / "out.json").write_text(json.dumps({"machines": [other]}))
    words = ["--data", tmp_path, "--out", tmp_path / "out.json", "--photographs", "1", "--repeats", "1"]
    words += ["--images", "16", "--batch", "4", "--workers", "0", "--train-rate", "vgg11-gmp=1e9"]
    monkeypatch.setattr(sys, "argv", ["input_pipeline.py", *map(str, words)])
    for _ in range(2):
        input_pipeline.main()
    kept, ours = json.loads((tmp_path / "out.json").read_text())["machines"]
    assert kept == other
    assert ours["rows"]["shrunk"]["worker"]["lowest"] > 0
    assert ours["rows"]["shrunk"]["loader"]["0"] > 0
    assert ours["rows"].keys() >= {"upscaled", "mosaic", "shrunk"}
    assert ours["idle"]["vgg11-gmp"] > 0.99


ROOT = Path(__file__).parents[2]

TIMM = '''
import os, time
import torch
from torch import nn

__version__ = "9.9"

def convs(width=8):
    return nn.Sequential(nn.Conv2d(3, width, 1), nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 4, 1))

class NeedsValues(nn.Module):
    """Cannot be built on the meta device."""
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(1).item()
        self.convs = convs()
    def forward(self, x):
        return {"out": self.convs(x) * self.scale, "more": [x]}

class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).requires_grad_(False)

def crash():
    os.abort()

def hang():
    time.sleep(600)

def noisy():
    print("x" * 100_000)
    return convs()

def broken():
    raise RuntimeError("no such thing\\nand more")

NETWORKS = {
    "plain": convs, "values": NeedsValues, "crash": crash, "hang": hang, "noisy": noisy, "broken": broken,
    "mixer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), "large": lambda: convs(400), "frozen": Frozen,
}

def list_models():
    return list(NETWORKS)

def create_model(name, pretrained=False):
    network = NETWORKS[name]()
    network.pretrained_cfg = {"input_size": (3, 8, 8)}
    return network
'''


@pytest.fixture
def zoo(tmp_path: Path):
    """Run the benchmark against the stand-ins, and give its record and what it printed."""
    (tmp_path / "timm.py").write_text(TIMM)

    def run(*more: object) -> tuple[dict[str, dict], str]:
        out = tmp_path / "zoo.json"
        options = ["--families", "timm", "--jobs", "2", "--largest", "5000", "--out", out, *more]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.zoo", *map(str, options)],
            env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True,
        )  # fmt: skip
        record = json.loads(out.read_text())
        assert record["environment"]["timm"] == "9.9"
        return {row["network"].removeprefix("timm:"): row for row in record["networks"]}, done.stdout

    return run


@pytest.mark.nightly
def test_no_network_takes_the_others_down(zoo):
    rows, printed = zoo("--patience", "60")
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    failed = ("crash", "hang", "broken")
    assert outcomes == {
        **dict.fromkeys(("plain", "values", "noisy", "large"), "converted"),
        **dict.fromkeys(failed, "failed"),
        **dict.fromkeys(("mixer", "frozen"), "nothing to convert"),
    }
    assert [rows[name]["why"].split(":")[0] for name in failed] == [
        "its process ended with -6",
        "took more than 60 s",
        "LowRankError",
    ]
    assert rows["broken"]["why"].endswith("RuntimeError: no such thing")
    assert (rows["plain"]["macs_before"], rows["plain"]["macs_after"]) == (
        64 * (24 + 576 + 32),
        64 * (24 + 192 + 64 + 32),
    )
    assert (rows["plain"]["changed"], rows["plain"]["kept"]) == (1, {"its kernel is 1x1": 2})
    assert "FAILED timm:crash: its process ended with -6" in printed
