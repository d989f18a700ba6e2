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

from lowrank_cnn.choose.candidates import Design
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


def test_depthwise_layers_are_drawn(put: Put, tmp_path: Path):
    pytest.importorskip("vl_convert")
    put("depthwise.json", depthwise_record())
    importlib.import_module("tables.depthwise").draw(tmp_path / "depthwise.svg")
    drawn = (tmp_path / "depthwise.svg").read_text()
    assert all(f"{kind}, forward" in drawn for kind in ("bands", "7x7", "3x3"))
    assert drawn.count('aria-roledescription="bar"') == 12  # three kinds, two maps, two ways


def test_shapes_show_each_design_beside_the_thin_network_of_its_time(blocks: ModuleType, put: Put):
    rows = [{"network": name, "top1": 90.0, "ms": 1.5, "runs": 8 * [{}]} for name in ("lr", "dense-32s@0.5")]
    gap = {"gap": -0.3, "low": -1.0, "high": 0.4, "margin": 0.5, "verdict": "no"}
    answers = [{"ours": "lr", "theirs": "dense-32s@0.5", **gap}]
    put("modelnet10.json", {"batch": 256, "networks": rows, "answers": answers})
    found = cells(blocks.TABLES["modelnet10"](), "`lr`")[1:]
    shown = "90.0% in 1.50 ms"
    assert found == [shown, "`dense-32s@0.5`", shown, "-0.30 (-1.00 to +0.40)", "no"]


def frontier(folder: Path, designs: dict[str, tuple[float, int]]) -> Frontier:
    """A record where the tables look for it: designs with their times and numbers of runs."""
    place = folder / "frontier" / "cifar10"
    place.mkdir(parents=True)
    about: dict[str, Any] = dict.fromkeys(("recipe", "precision", "device", "teacher"), "")
    about |= {"network": {"base": 1.0}, "family": "airbench", "data": {"name": "cifar10"}}
    found = Frontier(place, about, 1000)
    found.environments.append(ENVIRONMENT)
    for name, (ms, seeds) in designs.items():
        design = Design(name, name)
        runs = [SeedRun(seed, 900 + seed, 0, "", 3.0, 4.0, 1.0, 1.0, 0) for seed in range(1, seeds + 1)]
        found.rows.append(DesignRow(design, 10**6, 10**5, DesignTime(ms, ms, ms, 2.0, 256, "folded"), runs=runs))
    return found


def test_a_frontier_shows_its_networks_by_time_and_its_verdicts(blocks: ModuleType, put: Put, tmp_path: Path):
    found = frontier(tmp_path, {"dense": (2.0, 32), "lr": (1.0, 32), "lr-join": (1.5, 2)})
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
    assert "`frontier/cifar10` (abc)" in text
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
    assert "No verdict, for too few runs or one learning rate for all: 1 in `cifar10`." in text
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
