"""What the benchmarks of depth and memory say of networks whose weak points are known."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from lowrank_cnn.data import open_data
from lowrank_cnn.models import create_model
from lowrank_cnn.train import fit


@pytest.fixture(scope="module")
def depth_flow(benchmark_module):
    return benchmark_module("depth_flow")


def batches(n: int = 2):
    draw = torch.Generator().manual_seed(0)
    return ((torch.randn(8, 3, 32, 32, generator=draw), torch.arange(8) % 4) for _ in range(n))


def network(name: str, **options):
    torch.manual_seed(0)
    return create_model(name, num_classes=4, width=0.125, dropout=0.0, **options)


def test_a_group_that_answers_nothing_is_named(depth_flow):
    net = network("vgg11-gmp-lr")
    with torch.no_grad():
        net.features.conv3_1.weights[1].zero_()
    row = depth_flow.examined("net", net, batches())
    assert row["dead_groups"] == ["features.conv3_1 1x3"]
    assert row["dead"]["features.conv3_1"]["groups"]["1x3"] == [16, 16]
    assert row["worst_group"] == ["features.conv3_1 1x3", 1.0]


def test_a_layer_that_swallows_gradients_shows(depth_flow):
    plain = depth_flow.examined("net", network("vgg11-gmp"), batches())
    net = network("vgg11-gmp")
    with torch.no_grad():
        net.features.conv4_1.weight.mul_(1e-3)
    faint = depth_flow.examined("net", net, batches())
    assert next(iter(plain["flow"])) == "features.conv1_1"
    assert 0.05 < plain["first_to_last"] < 20
    assert faint["first_to_last"] < 0.05 * plain["first_to_last"]
    assert faint["least"] <= faint["first_to_last"] <= faint["most"]


def test_auxiliary_heads_are_not_the_last_layers(depth_flow):
    row = depth_flow.examined("net", network("googlenet-lr"), batches(1))
    assert any(name.startswith("aux1") for name in row["flow"])
    assert 0 < row["dead_share"] < 1
    assert any("branch3" in site for site in row["dead"])


@pytest.mark.nightly
def test_a_run_can_be_examined(depth_flow, tmp_path, monkeypatch):
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


def memory_record(benchmark_module, monkeypatch, out, *words):
    monkeypatch.setattr(sys, "argv", ["memory.py", "--part", "kept", "--out", str(out), *words])
    benchmark_module("memory").main()
    return json.loads(out.read_text())


def test_less_memory_is_kept_where_stages_are_computed_again(benchmark_module, tmp_path, monkeypatch):
    words = ["--networks", "vgg11-gmp", "--images", "32"]
    record = memory_record(benchmark_module, monkeypatch, tmp_path / "memory.json", *words)
    kept, again = (row["kept_bytes_per_image"] for row in record["kept"]["rows"])
    # Filters, sides and convs of the stages; a pool keeps its output and the places of maxima.
    stages = [(64, 32, 1), (128, 16, 1), (256, 8, 2), (512, 4, 2), (512, 2, 2)]
    maps = sum(4 * n * side**2 * convs for n, side, convs in stages) + 4 * 3 * 32**2
    ends = [n * (side // 2) ** 2 for n, side, _ in stages[:-1]]
    head = 4 * (512 + 6 * 4096)
    assert kept == pytest.approx(maps + 12 * sum(ends) + head, rel=0.02)
    assert again == pytest.approx(4 * 3 * 32**2 + 4 * sum(ends) + 4 * 512 * 2**2 + head, rel=0.02)


def test_a_record_keeps_what_other_processors_gave(benchmark_module, write_shards, photo, tmp_path, monkeypatch):
    pipeline = benchmark_module("input_pipeline")
    rows = [(photo(number, size=(64, 64)), 0) for number in range(48)]
    write_shards(tmp_path, "train", [rows[:2]])
    write_shards(tmp_path, "test", [rows])
    other = {"environment": {"cpu": "another"}, "rows": {}}
    (tmp_path / "out.json").write_text(json.dumps({"machines": [other]}))
    words = ["--data", tmp_path, "--out", tmp_path / "out.json", "--photographs", "1", "--repeats", "1"]
    words += ["--images", "16", "--batch", "4", "--workers", "0", "--train-rate", "vgg11-gmp=1e9"]
    monkeypatch.setattr(sys, "argv", ["input_pipeline.py", *map(str, words)])
    for _ in range(2):
        pipeline.main()
    kept, ours = json.loads((tmp_path / "out.json").read_text())["machines"]
    assert kept == other
    assert ours["rows"]["shrunk"]["worker"]["lowest"] > 0
    assert ours["rows"]["shrunk"]["loader"]["0"] > 0
    assert ours["rows"].keys() >= {"upscaled", "mosaic", "shrunk"}
    assert ours["idle"]["vgg11-gmp"] > 0.99
