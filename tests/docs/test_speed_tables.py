"""Tables of recorded times: the newest run of each network, with its dense twin beside it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from table_records import ENVIRONMENT, ROOT, Put, cells

from lowrank_cnn.method.count import count
from lowrank_cnn.models import create_model


def speed_run(commit: str, dense_ms: float, mode: str = "inference", **networks: float) -> dict[str, Any]:
    """A run of a dense network by two ways and ours, and of low-rank networks beside it, by their milliseconds."""
    place = f"{mode}|256|"
    times = {f"dense|{place}compile": dense_ms, f"dense|{place}cudnn": 2 * dense_ms, f"dense|{place}ours": 1.0}
    times |= {f"{name}|{place}fused": ms for name, ms in networks.items()}
    row = {"mode": mode, "batch": 256, "way": "fused", "dense": "dense", "dense_way": "compile", "mac_ratio": 0.3}
    row |= {"dense_ms": dense_ms, "tricks_way": "ours", "tricks_ms": 1.0, "tflops": 400.0, "floor_ms": 0.5}
    ratios = {name: {"ratio": ms / dense_ms, "tricks_ratio": ms / 1.0} for name, ms in networks.items()}
    return {
        "environment": {**ENVIRONMENT, "gpu": "a GPU", "commit": commit, "date": commit},
        "undone": [f"dense|{place}max-autotune", "other|inference|256|max-autotune"],
        "limits": {"tflops": 800.0, "tb_per_s": 4.0},
        "ways": {k: {"ms": ms, "least": 0.9 * ms, "most": 1.1 * ms, "repeats": 21} for k, ms in times.items()},
        "rows": [{"network": name, "ms": ms, **row, **ratios[name]} for name, ms in networks.items()],
    }


def test_the_newest_run_of_a_network_is_shown_with_the_dense_one_beside_it(blocks: ModuleType, put: Put):
    put("gpu_speed.json", {"runs": [speed_run("1old", 10.0, a=5.0, b=4.0), speed_run("2new", 20.0, a=6.0)]})
    text = blocks.TABLES["gpu-speed"]()
    shown = ["0.300", "**0.300**", "6.000", "6.00 (5.40 to 6.60)", "20.00 (18.00 to 22.00) compile"]
    assert cells(text, "`a`")[1:6] == shown
    shown = ["0.300", "**0.400**", "4.000", "4.00 (3.60 to 4.40)", "10.00 (9.00 to 11.00) compile"]
    assert cells(text, "`b`")[1:6] == shown
    assert "commits 1old, 2new" in text
    assert "Not measured: `dense` with max-autotune." in text


def test_runs_that_are_not_shown_are_not_named(blocks: ModuleType, put: Put):
    runs = [
        speed_run("1old", 10.0, a=5.0),
        speed_run("2new", 20.0, a=6.0),
        speed_run("3train", 9.0, "training", a=3.0),
    ]
    runs[0]["note"], runs[1]["note"] = "The old note.", "The new note."
    put("gpu_speed.json", {"runs": runs})
    text = blocks.TABLES["gpu-speed"]()
    assert "commit 2new" in text
    assert "1old" not in text
    assert "The new note." in text
    assert "The old note." not in text
    assert cells(blocks.TABLES["gpu-training"](), "`a`")[2] == "**0.333**"


def test_inference_and_training_stand_beside_each_other(blocks: ModuleType, put: Put):
    runs = [speed_run("1inf", 10.0, a=5.0, b=4.0), speed_run("2train", 30.0, "training", a=6.0, c=9.0)]
    put("gpu_speed.json", {"runs": runs})
    text = blocks.TABLES["gpu-ratios"]()
    assert cells(text, "`a`")[2:] == ["**0.500** (0.409 to 0.611)", "**0.200** (0.164 to 0.244)"]
    assert [cells(text, name)[2:].index("not measured yet") for name in ("`b`", "`c`")] == [1, 0]


def test_every_recorded_row_is_made_of_its_own_run():
    """The dense time is that of the fastest way without our kernels, in the run that measured ours."""
    for run in json.loads((ROOT / "benchmarks" / "results" / "gpu_speed.json").read_text())["runs"]:
        assert not [name for name, way in run["ways"].items() if "skipped" in way]
        for row in run["rows"]:
            start = f"{row['dense']}|{row['mode']}|{row['batch']}|"
            dense = {
                name.removeprefix(start): way["ms"] for name, way in run["ways"].items() if name.startswith(start)
            }
            rivals = {way: ms for way, ms in dense.items() if "ours" not in way}
            assert row["dense_way"] == min(rivals, key=rivals.__getitem__)
            assert row["dense_ms"] == rivals[row["dense_way"]]
            ours = run["ways"][f"{row['network']}|{row['mode']}|{row['batch']}|{row['way']}"]["ms"]
            assert row["ms"] == ours
            assert row["ratio"] == pytest.approx(ours / row["dense_ms"])
            assert ("tricks_ratio" in row) == ("ours" in dense)
            if "ours" in dense:
                assert row["tricks_ratio"] == pytest.approx(ours / dense["ours"])


def test_a_measurement_adds_its_run_to_the_record(blocks: ModuleType, put: Put, tmp_path: Path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    book_of = importlib.import_module("gpu_book")
    put("gpu_speed.json", {"kind": "gpu-speed", "runs": [speed_run("1old", 10.0, a=5.0)]})
    book = book_of.Book(SimpleNamespace(out=tmp_path / "gpu_speed.json", budget=9), 0.0)
    book.found["ways"] = {"a|inference|256|fused": {"ms": 4.0}, "dense|inference|256|cudnn": {"skipped": "late"}}
    for _ in range(2):  # a run written twice is there once
        book.write()
    old, new = json.loads((tmp_path / "gpu_speed.json").read_text())["runs"]
    assert old["environment"]["commit"] == "1old"
    assert new["ways"] == {"a|inference|256|fused": {"ms": 4.0}}
    assert new["undone"] == ["dense|inference|256|cudnn"]
    put("other.json", {"kind": "train-speed", "runs": []})
    with pytest.raises(SystemExit, match="no record of runs of gpu-speed"):
        book_of.Book(SimpleNamespace(out=tmp_path / "other.json", budget=9), 0.0)


def training_run(commit: str, **rates: float) -> dict[str, Any]:
    """A run of train_speed.py: images per second by the way to train."""
    spread = {"lowest": 1.0, "highest": 9.0, "epochs": 2}
    ways = {way: {"images_per_second": rate, **spread} for way, rate in rates.items()}
    setting = {"recipes": {"nin-paper": {"batch_size": 128}}, "images": 50_000, "workers": 8}
    rows = [{"network": "nin", "recipe": "nin-paper", "ways": ways}]
    return {"setting": setting, "rows": rows, "environment": {**ENVIRONMENT, "commit": commit}}


def test_training_speed_is_of_the_newest_run_and_so_is_compiling(blocks: ModuleType, put: Put):
    graph, compiled = "CUDA graph", "CUDA graph, compiled"
    runs = [
        training_run("1", **{graph: 100.0, compiled: 70.0}),
        training_run("2", **{graph: 200.0, compiled: 150.0}),
        training_run("3", **{graph: 1000.0}),
    ]
    runs[1]["rows"][0]["ways"][compiled]["device_share"] = 0.9
    put("train_speed.json", {"runs": runs})
    text = blocks.TABLES["train-speed"]()
    assert cells(text, "`nin`") == ["`nin`", "`nin-paper`", "128", graph, "1,000 (1 to 9)", "50.00", ""]
    assert "trains 150 images/s (uncompiled\nin the same run: 200)." in text
    assert "70" not in text
    assert "commit 3" in text
    put("train_speed.json", {"runs": runs[:1]})
    assert "trains 70 images/s, its steps not recorded as a graph (" in blocks.TABLES["train-speed"]()
    put("train_speed.json", {"runs": runs[2:]})
    assert "Compiled" not in blocks.TABLES["train-speed"]()


def test_a_rival_that_failed_leaves_an_empty_cell(blocks: ModuleType, put: Put):
    def layer(naive: dict[str, Any], **more: str) -> dict[str, Any]:
        return {"backward": {"all": {"ms": 2.0}, "naive composite": naive, "dense": {"ms": 5.0}}, **more}

    layers = {"one": layer({"failed": "CUDA error"}), "two": layer({"ms": 3.0}, commit="def")}
    put("gpu_kernels.json", {"layers": layers | {"none": {"backward": {"failed": "all of it"}}}})
    text = blocks.TABLES["gpu-backward"]()
    assert cells(text, "one") == ["one", "2.00", "", "2.50"]
    assert cells(text, "two") == ["two", "2.00", "1.50", "2.50"]
    assert "none" not in text
    assert "commits abc, def" in text


def test_a_record_of_runs_is_listed_with_its_newest(blocks: ModuleType, put: Put, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tables.records.RESULTS", tmp_path)
    runs = [speed_run("2025-01-01T10", 10.0, a=5.0), speed_run("2026-02-03T10", 10.0, a=5.0)]
    put("gpu_speed.json", {"runs": runs})
    assert cells(blocks.TABLES["records"](), "`gpu_speed.json`")[2:] == ["a GPU", "9.9", "2026-02-03"]


def test_long_hashes_are_shown_in_twelve_digits(blocks: ModuleType):
    source = importlib.import_module("tables.form").source
    known = [
        {**ENVIRONMENT, "commit": commit} for commit in ("0123456789ab" * 3 + "+", "0123456789ab+", "fedcba987654")
    ]
    assert "commits 0123456789ab+, fedcba987654." in source("x.json", *known)


@pytest.mark.usefixtures("blocks")
def test_networks_are_timed_at_the_size_that_the_pages_name():
    """The record tells operations per second, and so the MACs of the network that was timed."""
    sizes = importlib.import_module("tables.gpu").SIZES
    side = int(re.findall(r"NiN (\d+)x", sizes)[0])
    macs = count(create_model("nin-c3-lr"), (3, side, side)).macs
    rows = [
        row
        for run in json.loads((ROOT / "benchmarks/results/gpu_speed.json").read_text())["runs"]
        for row in run["rows"]
    ]
    timed = [row for row in rows if (row["network"], row["mode"]) == ("nin-c3-lr", "inference")]
    assert timed
    for row in timed:
        assert row["tflops"] * 1e9 * row["ms"] / row["batch"] / 2 == pytest.approx(macs, rel=1e-3)
