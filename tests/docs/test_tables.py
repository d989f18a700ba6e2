"""The tables of the documentation, on made-up records: which runs they show, and what they say without any."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lowrank_cnn.choose.frontier import DesignRow, DesignTime, Frontier, RateTry, SeedRun
from lowrank_cnn.method.count import count
from lowrank_cnn.models import create_model
from tests.support import ROOT, load_file

ENVIRONMENT = {"gpu": None, "cpu": "some cores", "torch": "9.9", "commit": "abc", "timm": "1", "torchvision": "2"}

Put = Callable[[str, dict[str, Any]], None]
"""Writes a record to where the tables look for it."""


def cells(text: str, start: str) -> list[str]:
    """The cells of the line that begins with this one."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture(scope="module")
def blocks() -> ModuleType:
    return load_file("docs/blocks.py")


@pytest.fixture
def put(blocks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Write a record to where the tables look for them, which is empty at first."""
    monkeypatch.setattr("tables.form.RESULTS", tmp_path)

    def write(name: str, record: dict[str, Any]) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"environment": ENVIRONMENT, **record}))

    return write


TO_COME = (
    "learned-shapes",
    "initialisations",
    "decompose",
    "decompose-aware",
    "depth-flow",
    "frontier",
    "full-run",
    "headline",
    "input-pipeline",
    "loaders",
    "memory",
    "tiny-imagenet",
    "cpu-verdicts",
    "speed-verdicts",
    "verdicts",
    "zoo",
)


@pytest.mark.parametrize("name", TO_COME)
def test_a_table_without_its_record_says_so(blocks: ModuleType, put: Put, name: str):
    assert blocks.TABLES[name]() == "No runs recorded yet.\n"


def test_every_table_stands_on_a_page(blocks: ModuleType):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {match[1] for page in pages for match in blocks.BLOCK.findall(page.read_text())}
    assert shown == set(blocks.TABLES)


def test_other_libraries_are_summed_by_what_takes_their_networks(blocks: ModuleType, put: Put):
    fine = {"counted": "equal", "converted": "3 layers", "exported": "refused: too large"}
    rows = [
        {"name": f"monai:{name}", "cells": {**fine, "merged": cell}}
        for name, cell in (("a", "1e-07"), ("b", "RAW: no"))
    ]
    versions = dict.fromkeys(("pytorchcv", "transformers", "diffusers", "monai", "efficientnet_pytorch"), "1")
    put("foreign.json", {"environment": {**ENVIRONMENT, **versions}, "rows": rows})
    text = blocks.TABLES["foreign-summary"]()
    assert cells(text, "monai 1")[1:4] == ["2", "2", "2"]
    assert cells(text, "monai 1")[5] == "1"  # merged
    assert cells(text, "monai 1")[-1] == "0"
    assert "2 networks, 14 results: 1 wrong or failed, 2 refused." in text


def depthwise_row(layer: str, channels: int, torch_ms: float) -> dict[str, Any]:
    times = {
        "copy": 0.1,
        "torch forward": torch_ms,
        "ours forward": 0.15,
        "torch both": 3 * torch_ms,
        "ours both": 0.5,
    }
    spread = {what: {"ms": ms, "least": ms, "most": 2 * ms} for what, ms in times.items()}
    return {"layer": layer, "channels": channels, "side": 14, "blocks": 3, "error": 0.002, **spread}


def depthwise_record() -> dict[str, Any]:
    rows = [depthwise_row(*own) for own in (("bands", 96, 1.2), ("7x7", 96, 0.5), ("3x3", 96, 0.2))]
    rows += [{**row, "channels": 192, "blocks": 9, "side": 7} for row in rows]
    return {"batch": 256, "layers": rows}


def test_depthwise_layers_are_over_a_copy_and_summed_by_blocks(blocks: ModuleType, put: Put, tmp_path: Path):
    assert blocks.TABLES["depthwise"]() == ""
    put("depthwise.json", depthwise_record())
    text = blocks.TABLES["depthwise"]()
    assert cells(text, "96, 14x14")[1:] == ["12.0", "1.5", "5.0", "1.5", "2.0", "1.5"]
    sums = [f"**{12 * ms:.2f}**" for ms in (1.2, 0.15, 0.5, 0.15, 0.2, 0.15)]  # 3 and 9 blocks
    assert cells(text, "all forward, ms")[1:] == sums
    assert cells(text, "and backward, ms")[1:3] == ["**43.20**", "**6.00**"]
    assert "sum over 3, 9 blocks (copies: 1.20 ms)" in text
    assert "0.002 of the norm" in text


def test_depthwise_layers_are_drawn(put: Put, tmp_path: Path):
    pytest.importorskip("vl_convert")
    put("depthwise.json", depthwise_record())
    importlib.import_module("tables.depthwise").draw(tmp_path / "depthwise.svg")
    drawn = (tmp_path / "depthwise.svg").read_text()
    assert all(f"{kind}, forward" in drawn for kind in ("bands", "7x7", "3x3"))
    assert drawn.count('aria-roledescription="bar"') == 12  # three kinds, two maps, two ways


def test_depthwise_networks_show_what_failed(blocks: ModuleType, put: Put):
    assert blocks.TABLES["depthwise-networks"]() == ""
    times = {"inference": {"torch": 14.6, "ours": 9.25}, "one image": {"torch": 2, "ours": 1.5}}
    rows = [{"network": "a", **times, "step": {"error": "of memory"}}, {"network": "b", "error": "too slow"}]
    put("depthwise_networks.json", {"batch": 256, "networks": rows})
    text = blocks.TABLES["depthwise-networks"]()
    assert cells(text, "`a`")[1:] == ["14.60", "9.25", "2.00", "1.50", "failed", "failed"]
    assert cells(text, "`b`")[1:] == ["failed"] * 6
    assert "| 256 images, torch | 256 images, ours | 1 image, torch |" in text


def test_networks_over_volumes_show_the_share_of_the_compilers_time(blocks: ModuleType, put: Put):
    times = {"torch": 10.0, "ours": 3.0, "ratio": 0.3}
    rows = [{"network": "r3d_18", "inference": times, "step": times}]
    put("volumes.json", {"batch": 32, "frames": 16, "side": 112, "networks": rows})
    assert cells(blocks.TABLES["volumes"](), "`r3d_18` by `lr`")[1:] == 2 * ["10.00", "3.00", "**0.30**"]


def test_shapes_show_each_design_beside_the_thin_network_of_its_time(blocks: ModuleType, put: Put):
    rows = [{"network": name, "top1": 90.0, "ms": 1.5, "runs": 8 * [{}]} for name in ("lr", "dense-32s@0.5")]
    gap = {"gap": -0.3, "low": -1.0, "high": 0.4, "margin": 0.5, "verdict": "no"}
    answers = [{"ours": "lr", "theirs": "dense-32s@0.5", **gap}]
    put("modelnet10.json", {"batch": 256, "networks": rows, "answers": answers})
    found = cells(blocks.TABLES["modelnet10"](), "`lr`")[1:]
    shown = "90.0% in 1.50 ms"
    assert found == [shown, "`dense-32s@0.5`", shown, "-0.30 (-1.00 to +0.40)", "no"]


def pipeline(**changes: Any) -> dict[str, Any]:
    rate = {"images_per_second": 100.0, "lowest": 90.0, "highest": 110.0}
    kind = {"bytes": 5e4, "decode": {"Pillow": rate}, "frame": {"chosen here": rate}, "worker": rate, "loader": {}}
    fast = kind | {"worker": {**rate, "images_per_second": 400.0}}
    setting = {"size": [500, 375], "repeats": 5, "photographs": 8, "libraries": {"pillow": "1"}}
    machine = {"rows": {"upscaled": kind, "mosaic": kind, "shrunk": fast}, "setting": setting, "idle": {}}
    return {**machine, "environment": ENVIRONMENT, **changes}


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
    assert [line[2] for line in lines] == ["1", "8"]
    hours, bound, hours_shrunk, bound_shrunk = lines[0][3:]
    steps = 90 * (round(0.98 * 1_281_167) // 256)
    assert float(hours.strip("*")) == pytest.approx(steps * 256 / 1600 / 3600, abs=0.05)
    assert float(hours_shrunk.strip("*")) == pytest.approx(
        steps * 0.064 / 3600, abs=0.05
    )  # the faster of the two ways
    assert (bound, bound_shrunk) == ("decode", "compute")
    for unmeasured in (
        "| ilsvrc | `vgg11-gmp-lr` | 1 | not measured yet |",
        "| places | `vgg11-gmp`, `vgg11-gmp-lr` | 8 | not measured yet |",
    ):
        assert unmeasured in text
    assert "`vgg11-gmp` on ilsvrc 4,000" in text
    assert "other cores, 100 images/s each" in text


def empty_frontier(folder: Path, family: str) -> Frontier:
    """A record of runs on CIFAR-10 without any runs, where the tables look for it."""
    place = folder / "frontier" / "cifar10"
    place.mkdir(parents=True)
    about: dict[str, Any] = dict.fromkeys(("recipe", "precision", "device", "teacher"), "")
    about["network"] = {"base": 1.0}
    found = Frontier(place, {**about, "family": family, "data": {"name": "cifar10"}}, 1000)
    found.environments.append(ENVIRONMENT)
    return found


def add(found: Frontier, name: str, ms: float, correct: int, seeds: int = 4) -> None:
    """A design called SCHEME or SCHEME@WIDTH, with its time and runs of so many right answers."""
    scheme, _, width = name.partition("@")
    design = {"name": name, "scheme": scheme, "width": float(width or 1), "matched": ""}
    runs = [SeedRun(seed, correct + seed, 0, "", 3.0, 4.0, 1.0, 1.0, 0) for seed in range(1, seeds + 1)]
    found.rows.append(DesignRow(design, 10**6, 10**5, DesignTime(ms, ms, ms, 2.0, 256, "folded"), runs=runs))


def test_a_frontier_shows_its_networks_by_time_and_its_verdicts(blocks: ModuleType, put: Put, tmp_path: Path):
    found = empty_frontier(tmp_path, "airbench")
    for name, ms in (("dense", 2.0), ("lr", 1.0), ("lr-join", 1.5)):
        add(found, name, ms, 900, seeds=2 if name == "lr-join" else 32)
    for row in found.rows:
        row.tries = [RateTry(rate, [0.9]) for rate in (0.5, 1.0)]
    judged = {
        "question": "better",
        "design": "lr",
        "control": "dense",
        "margin": 0.2,
        "time": 0.5,
        "verdict": "no",
    }
    judged |= {"gap": -1.0, "low": -2.0, "high": -0.1, "p": 1.0, "corrected": 1.0, "runs": [32, 32], "params": 0.4}
    judged["time_within"] = [0.45, 0.55]
    judged["notes"] = ["the best rate of lr, 1, is at the edge of those tried"]
    found.answers = [judged, judged | {"design": "lr-join", "runs": [2, 32]}]
    found.save()
    text = blocks.TABLES["frontier"]()
    assert text.index("`lr`") < text.index("`dense`")
    assert cells(text, "`lr`")[1:] == ["100k", "1.000", "91.65 ± 0.34"]
    assert "1,000 test images, 32 runs of each" in text
    assert "`lr-join`" not in text
    assert "record: `benchmarks/results/frontier/cifar10/frontier.json`" in text
    text = blocks.TABLES["verdicts"]()
    shown = [
        "better",
        "`dense`",
        "-1.00",
        "-2.00",
        "-0.10",
        "0.50 (0.45 to 0.55)",
        "0.40",
        "1.0000",
        '<b class="loses">loses</b> e',
    ]
    assert cells(text, "`lr`")[1:] == shown
    assert "32 runs of each, 2 learning rates tried in 1 run each; *better* by 0.2:" in text
    assert "`lr-join`" not in text
    assert "Questions with too few runs for a verdict: 1 in `cifar10`." in text
    assert "`lowrank frontier airbench --out benchmarks/results/frontier/cifar10`" in text


@pytest.mark.parametrize(
    ("verdict", "low", "high", "word"),
    [
        ("yes", 0.3, 0.9, "wins"),
        ("no", -0.1, 0.1, "level"),
        ("no", -0.9, -0.1, "loses"),
        ("no", -0.9, 0.1, "does not win"),
        ("undecided", -0.1, 0.4, "undecided"),
        ("not tuned", 0.3, 0.9, "not tuned"),
    ],
)
@pytest.mark.usefixtures("blocks")
def test_a_verdict_is_one_word(verdict: str, low: float, high: float, word: str):
    said = importlib.import_module("tables.frontier").verdict
    assert said({"verdict": verdict, "low": low, "high": high, "margin": 0.2}) == word


@pytest.mark.parametrize(
    ("ours", "word"), [(0.9, "wins"), (0.94, "undecided"), (1.06, "undecided"), (1.1, "loses")]
)
@pytest.mark.usefixtures("blocks")
def test_times_that_differ_less_than_they_repeat_decide_nothing(ours: float, word: str):
    found = importlib.import_module("tables.form").compared(ours, 1.0, 0.07)
    assert found == f'{ours:.2f} <b class="{word}">{word}</b>'


def judged(design: str, control: str, gap: float, question: str = "better") -> dict[str, Any]:
    return {"question": question, "design": design, "control": control, "gap": gap, "verdict": "undecided"}


def test_the_first_screen_shows_the_strongest_rival_of_the_best_design(
    blocks: ModuleType, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tables.headline.SHOWN", ("cifar10", "not measured"))
    found = empty_frontier(tmp_path, "nin")
    found.about["recipe"] = {"epochs": 10}
    rows = (
        ("dense", 2.0, 897),
        ("lr", 1.0, 888),
        ("wfull", 1.2, 880),
        ("dense@0.5", 1.1, 868),
        ("thin", 1.0, 878),
    )
    for name, ms, correct in rows:
        add(found, name, ms, correct)
    found.answers = [judged("lr", "dense@0.5", 1.0), judged("lr", "thin", 0.1, "better than a searched rival")]
    found.answers += [judged("wfull", "dense@0.5", 0.0), judged("lr", "dense", 0.9, "faster")]
    found.save()
    row = ["90.0", "2.00", "89.0", "1.00", "88.0", "1.00", "undecided"]
    assert cells(blocks.TABLES["headline"](), "NiN, CIFAR-10")[1:] == row


def test_the_times_of_a_search_are_in_a_file_of_their_own(
    blocks: ModuleType, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tables.headline.SHOWN", ("cifar10",))
    found = empty_frontier(tmp_path, "nin")
    found.about["recipe"] = {"epochs": 10}
    for name in ("dense", "lr", "thin"):
        add(found, name, 7.0, 880)
        found.rows[-1].timing = None
    found.answers = [judged("lr", "thin", 0.0)]
    found.save()
    shares = {"dense": 1.0, "lr": 0.5, "thin": 0.75}
    timed = [{"design": name, "ms": [2, 9, 4], "of_dense": [0, share, 2]} for name, share in shares.items()]
    (found.folder / "times.json").write_text(json.dumps({"rows": timed}))
    row = cells(blocks.TABLES["headline"](), "NiN, CIFAR-10")
    assert [row[place] for place in (2, 4, 6)] == ["4.00", "2.00", "3.00"]


def test_a_picture_for_dark_pages_exchanges_its_colours():
    picture = importlib.import_module("tables.headline").for_dark_pages(
        '<svg width="1"><path fill="#0072b2"/></svg>'
    )
    assert '[fill="#0072b2"]{fill:#56b4e9}' in picture
    assert picture.startswith('<svg width="1"><style>@media (prefers-color-scheme:dark){')


def test_a_recording_shows_every_line_for_its_time():
    recording = load_file("docs/recording.py")
    events = iter(
        [(30.0, "loading"), (90.0, "\r1 of 2\x1b[K\r\n"), (91.0, "\x1b[1mdone\x1b[0m\r\n\x1b[1A\x1b[2K<end>")]
    )
    found = list(recording.frames(events, "$ demo"))
    assert [lines for _, lines in found[1:]] == [
        ["$ demo", "loading"],
        ["$ demo", "1 of 2", ""],
        ["$ demo", "1 of 2", "<end>", ""],
    ]
    shown = recording.shortened(found)
    assert [seconds for seconds, _ in shown] == pytest.approx([0, 6.5, 13, 14])
    picture = recording.drawn(shown, "demo")
    assert "&lt;end&gt;" in picture
    assert 'values="0;1;0" keyTimes="0;0.325;0.65"' in picture  # loading


def speed_run(commit: str, dense_ms: float, mode: str = "inference", **networks: float) -> dict[str, Any]:
    """A run of a dense network by two ways and ours, and of low-rank networks beside it, by their milliseconds."""
    place = f"{mode}|256|"
    times = {f"dense|{place}compile": dense_ms, f"dense|{place}cudnn": 2 * dense_ms, f"dense|{place}ours": 1.0}
    times |= {f"{name}|{place}fused": ms for name, ms in networks.items()}
    row = {"mode": mode, "batch": 256, "way": "fused", "dense": "dense", "dense_way": "compile", "mac_ratio": 0.3}
    row |= {"dense_ms": dense_ms, "tricks_way": "ours", "tricks_ms": 1.0}
    ratios = {name: {"ratio": ms / dense_ms, "tricks_ratio": ms / 1.0} for name, ms in networks.items()}
    return {
        "environment": {**ENVIRONMENT, "gpu": "a GPU", "commit": commit, "date": commit},
        "undone": [f"dense|{place}max-autotune", "other|inference|256|max-autotune"],
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
