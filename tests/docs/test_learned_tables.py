"""The tables of learned shapes: accuracy with intervals, milliseconds, and verdicts at equal time."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from table_records import ENVIRONMENT, Put, cells

GPU = {**ENVIRONMENT, "gpu": "some GPU"}


def answer(ours: str, theirs: str, gap: float, verdict: str, **more: float) -> dict[str, Any]:
    spread = {"gap": gap, "low": gap - 0.3, "high": gap + 0.3, "p": 0.001, "corrected": 0.0004}
    return {"ours": ours, "theirs": theirs, "margin": 0.5, **spread, "verdict": verdict, **more}


def record(*, timed: bool) -> dict[str, Any]:
    """Two seeds of each way."""
    ways = {"thin": (0.800, 1.0), "strips": (0.805, 1.2), "proximal": (0.82, 1.01), "again": (0.81, 1.02)}
    rows: list[dict[str, Any]] = []
    for way, (top1, ms) in ways.items():
        row = {"way": way, "phase": "full", "rate": 1.0, "macs": 0.55, "params": 9, "shapes": None}
        time = {"ms": {"ours": ms, "low": ms, "high": ms, "dense": 2.0}} if timed else {}
        scheme = {"scheme": "mixture(kx1, 1xk, kxk=2)"} if way == "strips" else {}
        rows += [{**row, **time, **scheme, "seed": 0, "top1": top1}, {**row, "seed": 1, "top1": top1 + 0.01}]
    pairs = [("proximal", "thin", 2.0, "yes"), ("proximal", "strips", 1.5, "undecided")]
    pairs += [("again", "thin", 1.0, "yes"), ("again", "strips", 0.1, "no")]
    times = {"thin": {"time": 0.99, "tolerance": 0.03}, "strips": {"time": 1.188, "tolerance": 0.03}}
    about = {"network": "nin", "width": 1.0, "data": "cifar10", "train": None, "recipe": {"epochs": 40}}
    return {
        "about": about,
        "answers": [answer(*pair) for pair in pairs],
        "equal_time": [answer(*pair, **times[pair[1]]) for pair in pairs] if timed else [],
        "mechanisms": [answer("proximal", "gates", 1.0, "yes"), answer("proximal", "energy", 0.1, "undecided")],
        "rows": rows,
    }


def test_a_timed_record_has_times_intervals_and_verdicts(blocks: ModuleType, put: Put):
    put("learned_shapes_cifar10.json", {**record(timed=True), "environment": GPU})
    put("learned_shapes_a_small_one.json", record(timed=False))
    text = blocks.TABLES["learned-shapes"]()
    assert text.index("some GPU") < text.index("some cores")
    assert "miniatures" not in text
    assert cells(text, "`proximal`") == [
        "`proximal`", "0.550", "1.010", "0.51", "82.50 ± 0.71", "2",
        "+2.00 (+1.70 to +2.30)", "+1.50 (+1.20 to +1.80)",
    ]  # fmt: skip
    assert "| `proximal` | `thin` | 0.99, equal | +2.00 (+1.70 to +2.30) | yes |" in text
    assert "| `proximal` | `strips` | 1.19, slower | +1.50 (+1.20 to +1.80) | undecided |" in text
    assert "Ahead of every rival by 0.5 points at equal time? `proximal`: undecided; `again`: no." in text
    assert "`strips` is `mixture(kx1, 1xk, kxk=2)` in every layer." in text
    assert "`gates` by +1.00 (+0.70 to +1.30), decided with p = 0.0004; `energy`" in text


def test_a_record_without_times_says_so(blocks: ModuleType, put: Put):
    put("learned_shapes_cifar10.json", record(timed=False))
    text = blocks.TABLES["learned-shapes"]()
    assert text.startswith("**Only miniatures have been run so far**")
    assert "The networks have not been timed." in text
    assert "ms" not in text.split("|")
