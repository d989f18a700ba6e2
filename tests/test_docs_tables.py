"""The tables of the documentation, from records made up for the purpose: also those that are still to come."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lowrank_cnn.frontier.record import DesignRow, DesignTime, Frontier, SeedRun
from lowrank_cnn.method.counting import count
from lowrank_cnn.models import create_model
from lowrank_cnn.paper.table import AccuracyRow, ExperimentTable

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {"gpu": None, "cpu": "some cores", "torch": "9.9", "commit": "abc", "timm": "1", "torchvision": "2"}
TO_COME = (
    "learned-shapes",
    "initialisations",
    "decompose",
    "decompose-aware",
    "depth-flow",
    "frontier",
    "full-run",
    "input-pipeline",
    "loaders",
    "memory",
    "tiny-imagenet",
    "zoo",
)

Put = Callable[[str, dict[str, Any]], None]


@pytest.fixture(scope="module")
def blocks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("blocks", ROOT / "docs" / "blocks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def put(blocks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Write a record to where the tables look for them, which is empty at first."""
    monkeypatch.setattr("tables.form.RESULTS", tmp_path)

    def write(name: str, record: dict[str, Any]) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"environment": ENVIRONMENT, **record}))

    return write


def cells(text: str, start: str) -> list[str]:
    """The cells of the line that begins with this one."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", TO_COME)
def test_a_table_without_its_record_says_so(blocks: ModuleType, put: Put, name: str):
    assert blocks.TABLES[name]() == "No runs recorded yet.\n"


def test_every_table_stands_on_a_page(blocks: ModuleType):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {match[1] for page in pages for match in blocks.BLOCK.findall(page.read_text())}
    assert shown == set(blocks.TABLES)


def test_the_zoo_is_summed_up_and_failures_are_named(blocks: ModuleType, put: Put):
    cost = {"input": "3x224x224", "macs_before": 4_000_000_000, "macs_after": 1_000_000_000, "changed": 17}
    put(
        "zoo.json",
        {
            "scheme": "lr-join",
            "networks": [
                {"network": "torchvision:resnet18", "outcome": "converted", **cost},
                {"network": "torchvision:vit_b_16", "outcome": "nothing to convert", "why": "no conv"},
                {"network": "timm:unheard_of", "outcome": "converted", **cost},
                {"network": "timm:broken", "outcome": "failed", "why": "KeyError: `a|b`"},
                {"network": "timm:broken_too", "outcome": "failed", "why": "KeyError: `a|b`"},
            ],
        },
    )
    text = blocks.TABLES["zoo"]()
    assert cells(text, "") == ["", "networks", "converted", "nothing to convert", "failed"]
    assert cells(text, "torchvision") == ["torchvision", "2", "1", "1", "0"]
    assert cells(text, "timm") == ["timm", "3", "1", "0", "2"]
    assert cells(text, "`torchvision:resnet18`")[2:] == ["4.00 G", "1.00 G", "0.250", "17"]
    assert "unheard_of" not in text
    assert "| `timm:broken`, `timm:broken_too` | `KeyError: 'a\\|b'` |" in text


def row(network: str, published: float, *top1: float) -> AccuracyRow:
    top5 = tuple(value + 0.2 for value in top1)
    return AccuracyRow("paper", network, "", published, published + 0.2, top1, top5, 10**8, 10**6, 56, 30, 60.0)


def test_runs_stand_beside_the_papers_column(blocks: ModuleType, put: Put, tmp_path: Path):
    rows = (row("vgg11-gmp", 0.67, 0.4, 0.42), row("vgg11-gmp-lr", 0.66, 0.5, 0.51), row("vgg11", 0.65, 0.3))
    (tmp_path / "tiny-imagenet").mkdir()
    ExperimentTable("tiny-imagenet", rows, {"paper/vgg11-seed2": "not begun"}, {"paper": "Crops of 56."}).save(
        tmp_path / "tiny-imagenet"
    )
    text = blocks.TABLES["tiny-imagenet"]()
    assert cells(text, "`vgg11-gmp`")[1:6] == ["100 M", "41.00 ± 1.41", "67.00", "61.00 ± 1.41", "87.00"]
    assert cells(text, "`vgg11`")[2] == "30.00"
    assert cells(text, "lr matches gmp")[2:] == ["-1.00", "+9.50 ± 4.81", "holds"]
    assert "2 of 3 pairs of networks stand in the published order of top-1; rank correlation 0.50." in text
    assert "Crops of 56." in text
    assert "Not finished: 1 runs." in text


def pipeline(**changes: Any) -> dict[str, Any]:
    rate = {"images_per_second": 100.0, "lowest": 90.0, "highest": 110.0}
    kind = {"bytes": 5e4, "decode": {"Pillow": rate}, "frame": {"chosen here": rate}, "worker": rate, "loader": {}}
    fast = kind | {"worker": {**rate, "images_per_second": 400.0}}
    setting = {"size": [500, 375], "repeats": 5, "photographs": 8, "libraries": {"pillow": "1"}}
    machine = {"rows": {"upscaled": kind, "mosaic": kind, "shrunk": fast}, "setting": setting, "idle": {}}
    return {**machine, "environment": ENVIRONMENT, **changes}


def test_every_processor_has_its_table_of_rates(blocks: ModuleType, put: Put):
    other = pipeline(
        environment={**ENVIRONMENT, "cpu": "other cores"}, idle={"vgg11": 0.25}, train_rates={"vgg11": 8000}
    )
    put("input_pipeline.json", {"machines": [pipeline(), other]})
    text = blocks.TABLES["input-pipeline"]()
    assert cells(text, "read and framed")[1:] == ["a worker", *["100 (90 to 110)"] * 2, "400 (90 to 110)"]
    assert text.index("some cores") < text.index("other cores")
    assert "A GPU that trains `vgg11` at 8,000 images/s waits 25% of the time." in text
    assert "where the GPU decodes" not in text


def test_a_gpu_that_decodes_is_held_against_the_cpu(blocks: ModuleType, put: Put):
    machine = pipeline(idle={"vgg11": 0.75}, gpu_idle={"vgg11": 0.125}, train_rates={"vgg11": 8000})
    machine["rows"]["mosaic"] = machine["rows"]["mosaic"] | {
        "loader": {"0": 400.0, "16": 2000.0},
        "gpu_loader": {"0": 1000.0, "16": 7000.0},
        "gpu_decode": {"images_per_second": 20000.0, "lowest": 19000.0, "highest": 21000.0},
        "gpu_difference": 1.234,
    }
    put("input_pipeline.json", {"machines": [machine]})
    text = blocks.TABLES["input-pipeline"]()
    assert "The whole loader, textured, images/s: 0 workers 400; 16 workers 2,000." in text
    decoded = "0 workers 1,000; 16 workers 7,000; alone it decodes 20,000 (19,000 to 21,000)."
    assert f'The same where the GPU decodes (`decode="gpu"`): {decoded}' in text
    assert "Its pixels differ from Pillow's by 1.23 of 255 levels on the mean." in text
    waits = "waits 75% of the time, and 12% where it decodes them itself."
    assert f"A GPU that trains `vgg11` at 8,000 images/s {waits}" in text


def test_a_full_run_is_bound_by_its_slowest_part(blocks: ModuleType, put: Put):
    on_a_gpu = pipeline(environment={**ENVIRONMENT, "cpu": "other cores", "gpu": "a GPU"})
    put("input_pipeline.json", {"machines": [pipeline(), on_a_gpu]})
    ways = {"vgg11-gmp|training|256|graph": {"ms": 128.0}, "vgg11-gmp|training|256|ours": {"ms": 64.0}}
    ways |= {"vgg11-gmp|training|1|ours": {"ms": 0.001}, "vgg11-gmp|inference|256|ours": {"ms": 1.0}}
    ways |= {"vgg11-gmp-lr|training|256|fused": {"failed": "out of memory"}}
    before = {"vgg11-gmp|training|256|graph": {"ms": 32.0}}  # an older run, though it was faster
    after = {"nin|training|256|graph": {"ms": 1.0}}
    environment = {**ENVIRONMENT, "gpu": "a GPU"}
    runs = [{"ways": each, "rows": [], "environment": environment} for each in (before, ways, after)]
    put("gpu_speed.json", {"runs": runs})
    text = blocks.TABLES["full-run"]()
    lines = [cells(line, "ilsvrc") for line in text.splitlines() if line.startswith("| ilsvrc | `vgg11-gmp` |")]
    assert [line[2] for line in lines] == ["1", "8", "64"]
    compute, decode, shrunk, _, hours, bound, hours_shrunk, bound_shrunk = lines[0][3:]
    steps = 90 * (round(0.98 * 1_281_167) // 256)
    assert float(compute) == pytest.approx(steps * 0.064 / 3600, abs=0.05)  # the faster of the two ways
    assert float(decode) == pytest.approx(steps * 256 / 1600 / 3600, abs=0.05)
    assert float(shrunk) == pytest.approx(float(decode) / 4, abs=0.05)
    assert (hours, bound, hours_shrunk, bound_shrunk) == (f"**{decode}**", "decode", f"**{compute}**", "compute")
    for unmeasured in (
        "| ilsvrc | `vgg11-gmp-lr` | 1 | not measured yet |",
        "| places | `vgg11-gmp` | 8 | not measured yet |",
    ):
        assert unmeasured in text
    assert "`vgg11-gmp` on ilsvrc 4,000" in text
    assert "other cores, 100 images/s each" in text


def test_a_full_run_invents_no_rate(blocks: ModuleType, put: Put):
    put("input_pipeline.json", {"machines": [pipeline()]})
    put("gpu_speed.json", {"runs": []})
    text = blocks.TABLES["full-run"]()
    assert "no training rate at 224x224 is recorded" in text
    assert all(
        "not measured yet" in line for line in text.splitlines() if line.startswith(("| ilsvrc", "| places"))
    )


def test_peaks_of_a_gpu_join_what_is_kept(blocks: ModuleType, put: Put):
    kept = [
        {"network": "vgg11", "image": image, "way": way, "weight_bytes": 4_000_000, "kept_bytes_per_image": size}
        for image, sizes in ((224, (2_000_000, 500_000)), (56, (125_000, 30_000)))
        for way, size in zip(("all maps kept", "stages computed again"), sizes, strict=True)
    ]
    record: dict[str, Any] = {"kept": {"rows": kept, "environment": ENVIRONMENT}}
    put("memory.json", record)
    assert cells(blocks.TABLES["memory"](), "`vgg11`") == ["`vgg11`", "4", "2.00", "0.50", "0.12", "0.03"]
    line = {"network": "vgg11", "image": 224, "way": "all maps kept"}
    peaks = [
        {**line, "batch": 64, "peak_bytes": 3e9},
        {**line, "batch": 512, "peak_bytes": None},
    ]
    put("memory.json", record | {"peaks": {"rows": peaks, "environment": {**ENVIRONMENT, "gpu": "a GPU"}}})
    text = blocks.TABLES["memory"]()
    assert "| `vgg11` | 224 | all maps kept | 3.0 | too large |" in text
    assert "a GPU" in text


def test_gradients_and_dead_filters_are_shown_over_seeds(blocks: ModuleType, put: Put):
    def seed(ratio: float, share: float) -> dict[str, Any]:
        ends = {"first_to_last": ratio, "least": ratio / 2, "most": 3.0}
        return ends | {"dead_share": share, "worst_group": ["conv5 1x3", 2 * share]}

    fresh = {"network": "vgg11", "norm": None, **seed(0.25, 0.1), "seeds": [seed(0.25, 0.1), seed(1.0, 0.2)]}
    trained = {"network": "paper/run", **seed(0.5, 0.0)}
    put("depth_flow.json", {"setting": {"images": 64, "dead_below": 1e-4}, "rows": [fresh, trained]})
    text = blocks.TABLES["depth-flow"]()
    shown = ["no", "0.5 (0.25 to 1)", "0.12", "3", "15.0%", "40.0%: `conv5 1x3`"]
    assert cells(text, "`vgg11`")[1:] == shown
    assert cells(text, "`paper/run`")[1:] == ["", "0.5", "0.25", "3", "0.0%", "none"]


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


def empty_frontier(folder: Path, family: str) -> Frontier:
    """A record of runs on CIFAR-10 without any runs, where the tables look for it."""
    place = folder / "frontier" / "cifar10"
    place.mkdir(parents=True)
    about: dict[str, Any] = dict.fromkeys(("network", "recipe", "precision", "device"), "")
    found = Frontier(place, {**about, "family": family, "data": {"name": "cifar10"}}, 1000)
    found.environments.append(ENVIRONMENT)
    return found


def test_a_frontier_shows_its_networks_by_time_and_its_verdicts(blocks: ModuleType, put: Put, tmp_path: Path):
    found = empty_frontier(tmp_path, "airbench")
    for name, ms in (("dense", 2.0), ("lr", 1.0)):
        design = {"name": name, "scheme": name, "width": 1.0, "matched": ""}
        runs = [SeedRun(seed, 900 + seed, 0, "", 3.0, 4.0, 1.0, 1.0, 0) for seed in (1, 2)]
        found.rows.append(DesignRow(design, 10**6, 10**5, DesignTime(ms, ms, ms, 2.0, 256, "folded"), runs=runs))
    answer = {
        "question": "better",
        "design": "lr",
        "control": "dense",
        "margin": 0.2,
        "time": 0.5,
        "verdict": "no",
    }
    found.answers = [{**answer, "gap": -1.0, "low": -2.0, "high": 0.0, "p": 1.0, "corrected": 1.0, "runs": [2, 2]}]
    found.save()
    text = blocks.TABLES["frontier"]()
    assert text.index("`lr`") < text.index("`dense`")
    assert cells(text, "`lr`")[1:] == ["1.00M", "100k", "1.000", "0.50", "90.15 (89.51 to 90.79)", "2", "3.0"]
    assert cells(text, "`lr` better by +0.2")[-1] == "no"
    assert "record: `benchmarks/results/frontier/cifar10/frontier.json`" in text


def test_networks_of_other_libraries_appear_with_every_reason(blocks: ModuleType, put: Put):
    versions = dict.fromkeys(("pytorchcv", "transformers", "diffusers", "monai", "efficientnet_pytorch"), "1.0")
    cells_of = {
        "counted": "equal",
        "merged": "1e-07, 0 of 2 folded: no layer feeds it",
        "exported": "refused: it is odd.",
    }
    rows = [{"name": f"monai:{name}", "cells": cells_of, "seconds": 1.0} for name in ("UNet", "VNet")]
    put("foreign.json", {"kind": "foreign", "environment": ENVIRONMENT | versions, "rows": rows})
    text = blocks.TABLES["foreign"]()
    assert cells(text, "monai:<wbr>UNet")[1:] == ["equal", "", "", "1e-07, 0 of 2 folded", "", "", "refused"]
    assert "- exported, refused: it is odd. (`UNet`, `VNet`)" in text
    assert "- merged, in part: no layer feeds it (`UNet`, `VNet`)" in text
    assert "2 networks, 14 results: 0 wrong or failed, 2 refused." in text


def test_foreign_networks_on_a_gpu_appear_with_their_record(blocks: ModuleType, put: Put):
    assert blocks.TABLES["gpu-models"]() == ""
    times = {"dense, torch.compile": 2.0, "dense, fit": 1.9, "low-rank, fit": 1.0}
    times = {way: {"ms": 1.5 * ms, "low": ms} for way, ms in times.items()}
    row = {"row": "torchvision:resnet18/lr", "macs": {"dense": 100, "low-rank": 33}}
    whole = {**row, "training": {"ms": times}}
    cut = {
        **row,
        "training": {"ms": {"dense, torch.compile": {"ms": 1.0, "low": 1.0}}},
        "inference": {"choice": {}},
    }
    slow = {**row, "training": {"ms": {way: {"ms": 9.0, "low": 9.0} for way in times}}}
    put("gpu_models.json", {"runs": [{"environment": ENVIRONMENT, "rows": [row]} for row in (whole, cut, slow)]})
    text = blocks.TABLES["gpu-models"]()
    assert text.startswith("## Networks of torchvision and timm on a GPU\n\n### Training step, batch 256\n")
    expected = ["0.330", "2.00 (1.00)", "1.90 (0.95)", "not measured", "1.00 (0.50)"]
    assert cells(text, "`resnet18`, `lr`")[1:] == expected
    assert "### Inference" not in text


def test_loaders_show_how_long_a_gpu_waits(blocks: ModuleType, put: Put) -> None:
    setting = {"size": [500, 375], "images": 64, "repeats": 3, "workers": 2, "crop": 160, "side": 183}
    setting["bytes"] = 9e4
    row = {"images_per_second": 100.4, "lowest": 90.0, "highest": 110.0, "seconds_before": 2.04}
    cpu = {"setting": setting, "rows": {"shrunk once": row}, "step_images_per_second": None}
    cpu["not_measured"] = {"decoded by the GPU": "there is none."}
    trained = {**row, "trained_per_second": 3000.0, "idle": 0.25}
    gpu = {"setting": {**setting, "network": "net"}, "rows": {"shrunk once": trained}, "not_measured": {}}
    gpu["step_images_per_second"] = 4000.0
    put("loaders.json", {"machines": [{**machine, "environment": ENVIRONMENT} for machine in (cpu, gpu)]})
    text = blocks.TABLES["loaders"]()
    assert cells(text, "shrunk once") == ["shrunk once", "100 (90 to 110)", "2.0"]
    assert "| shrunk once | 100 (90 to 110) | 2.0 | 3,000 | 25% |" in text
    assert "`net` trains at 4,000 images/s" in text
    assert "Not measured: decoded by the GPU (there is none)." in text


def test_the_first_screen_shows_thin_dense_as_soon_as_it_is_recorded(blocks: ModuleType, put: Put):
    times = {"dense, torch.compile": 3.0, "dense, optimize": 2.0, "low-rank, optimize": 1.0, "thin, optimize": 1.9}
    times["thin in 64s, optimize"] = 1.5
    macs = {"dense": 7 * 10**9, "low-rank": 2 * 10**9, "thin": 3 * 10**9, "thin in 64s": 2 * 10**9}
    row = {"row": "lowrank:vgg11-gmp/lr", "macs": macs}
    row["inference"] = {"ms": {way: {"ms": ms} for way, ms in times.items()}}
    put("gpu_models.json", {"runs": [{"environment": ENVIRONMENT, "rows": [row]}]})
    speed = {"network": "nin-c3-lr", "batch": 256, "ms": 1.0, "dense_ms": 4.0, "tricks_ratio": 0.5}
    rows = [{**speed, "mode": mode} for mode in ("inference", "training")]
    put("gpu_speed.json", {"runs": [{"environment": ENVIRONMENT, "rows": rows}]})
    for folder, names in (("cifar10", ("nin", "nin-c3-lr")), ("tiny-imagenet", ("vgg11-gmp", "vgg11-gmp-lr"))):
        known = [{"part": "paper", "network": name, "top1": [0.5, 0.6]} for name in names]
        put(f"{folder}/table.json", {"rows": known})
    text = blocks.TABLES["headline"]()
    assert cells(text, "`nin`, dense")[2:] == ["55.0%", "2.00 ms", "2.00 ms"]  # through our kernels
    assert cells(text, "`vgg11-gmp`, dense")[2:] == ["55.0%", "2.00 ms", "not measured"]
    assert cells(text, "`vgg11-gmp-lr`")[2:] == ["55.0%", "**1.00 ms**", "not measured"]
    assert cells(text, "`vgg11-gmp`, thin dense")[1:] == ["2.00 G", "not trained", "1.50 ms", "not measured"]
    assert "gpu_models.json" in text


def test_the_first_screen_takes_three_networks_of_a_frontier(blocks: ModuleType, put: Put, tmp_path: Path):
    found = empty_frontier(tmp_path, "nin")
    kinds = (("dense", 1.0, 2.0, 900), ("lr", 1.0, 1.0, 890), ("lr-join", 1.0, 1.9, 899), ("dense", 0.5, 1.1, 880))
    for scheme, width, ms, correct in kinds:
        name = scheme if width == 1 else f"{scheme}@{width:g}"
        design = {"name": name, "scheme": scheme, "width": width, "matched": ""}
        time = DesignTime(ms, ms, ms, 2.0, 256, "folded")
        runs = [SeedRun(seed, correct, 0, "", 3.0, 4.0, 1.0, 1.0, 0) for seed in range(1, 5)]
        found.rows.append(DesignRow(design, 10**9, 10**5, time, runs=runs))
    found.save()
    speed = {"batch": 256, "ms": 1.0, "dense_ms": 4.0}
    names = ("vgg11-gmp-lr", "vgg11-gmp-lr-join")
    rows = [{**speed, "network": name, "mode": mode} for name in names for mode in ("inference", "training")]
    put("gpu_speed.json", {"runs": [{"environment": ENVIRONMENT, "rows": rows}]})
    known = [{"part": "paper", "network": name, "top1": [0.5]} for name in ("vgg11-gmp", *names)]
    put("tiny-imagenet/table.json", {"rows": known})
    text = blocks.TABLES["headline"]()
    assert cells(text, "`nin`, dense")[2:] == ["90.0%", "2.00 ms", "3.0 s"]
    assert cells(text, "`nin, lr`")[2:] == ["89.0%", "**1.00 ms**", "3.0 s"]
    assert cells(text, "`nin, dense@0.5`, thin dense")[2:] == ["88.0%", "1.10 ms", "3.0 s"]
    assert "`nin, lr-join`" not in text  # no thin network takes as long


def test_timed_networks_take_their_accuracies_from_one_frontier(blocks: ModuleType, put: Put, tmp_path: Path):
    times = {"dense, torch.compile": 3.0, "dense, optimize": 2.0, "low-rank, optimize": 1.0, "thin, optimize": 1.5}
    row = {"row": "torchvision:resnet18/lr", "macs": {"dense": 10**9, "low-rank": 4 * 10**8, "thin": 5 * 10**8}}
    row["inference"] = {"ms": {way: {"ms": ms} for way, ms in times.items()}}
    put("gpu_models.json", {"runs": [{"environment": ENVIRONMENT, "rows": [row]}]})
    speed = {"batch": 256, "ms": 1.0, "dense_ms": 4.0}
    names = ("nin-c3-lr", "vgg11-gmp-lr", "vgg11-gmp-lr-join")
    rows = [{**speed, "network": name, "mode": mode} for name in names for mode in ("inference", "training")]
    put("gpu_speed.json", {"runs": [{"environment": ENVIRONMENT, "rows": rows}]})
    for folder, known in (("cifar10", ("nin", "nin-c3-lr")), ("tiny-imagenet", ("vgg11-gmp", *names[1:]))):
        table = [{"part": "paper", "network": name, "top1": [0.5]} for name in known]
        put(f"{folder}/table.json", {"rows": table})
    found = empty_frontier(tmp_path, "resnet18")
    for scheme, width, macs, correct in (("dense", 1.0, 100, 900), ("lr", 1.0, 40, 890), ("dense", 0.7, 55, 880)):
        name = scheme if width == 1 else f"{scheme}@{width}"
        runs = [SeedRun(seed, correct, 0, "", 3.0, 4.0, 1.0, 1.0, 0) for seed in range(1, 5)]
        design = {"name": name, "scheme": scheme, "width": width, "matched": ""}
        found.rows.append(DesignRow(design, macs, 10, None, runs=runs))
        found.save()
        tops = {kind: cells(blocks.TABLES["headline"](), f"`resnet18{kind}")[2] for kind in ("`, dense", "-lr`")}
        whole = width != 1
        assert tops == ({"`, dense": "90.0%", "-lr`": "89.0%"} if whole else dict.fromkeys(tops, "not trained"))
    text = blocks.TABLES["headline"]()
    assert cells(text, "`resnet18`, thin dense")[2:] == ["88.0%", "1.50 ms", "not measured"]
    assert "(mean of 4 seeds; timed at 224x224)" in text
    assert "was not trained" not in text


def test_learned_shapes_are_shown_by_falling_accuracy_with_what_was_decided(blocks: ModuleType, put: Put):
    about = {"network": "nin", "width": 0.1, "data": "stripes", "recipe": {"epochs": 10}}
    rows = [
        {"way": way, "top1": top1, "macs": 0.5} for way, top1 in (("thin", 0.5), ("proximal", 0.6), ("thin", 0.52))
    ]
    answer = {"ours": "proximal", "theirs": "thin", "margin": 0.5, "verdict": "yes"}
    put("learned_shapes_x.json", {"about": about, "rows": rows, "answers": [answer]})
    text = blocks.TABLES["learned-shapes"]()
    assert text.index("`proximal` |") < text.index("`thin` |")
    assert cells(text, "`thin`") == ["`thin`", "0.500", "51.00 ± 1.41", "2"]
    assert "`proximal` over `thin` by 0.5: yes." in text
    assert "nin (width 0.1) on stripes, 10 epochs" in text


def test_initialisations_are_shown_with_their_best_rates(blocks: ModuleType, put: Put):
    row = {"init": "torch", "rate": 2.0, "mean": 90.0, "sd": 0.5, "runs": 4, "tries": 5}
    row |= {"diverged_full": 1, "diverged_try": 2}
    about = {"network": "nin-c3-lr", "data": "cifar10", "recipe": {"epochs": 180}}
    put("initialisation_nin.json", {"about": about, "summary": [row]})
    text = blocks.TABLES["initialisations"]()
    assert cells(text, "`torch`") == ["`torch`", "x 2", "90.00 ± 0.50", "4", "1", "2 of 5"]


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
