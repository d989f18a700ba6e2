from __future__ import annotations

from pathlib import Path

import pytest

from lowrank_cnn.choose.frontier import DesignRow, DesignTime, Frontier, SeedRun
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.report.trade import draw_frontier


def frontier(folder: Path, designs: dict[str, tuple[float, float, int]]) -> Frontier:
    """Designs by name, each with a share of right answers, a time and a number of runs."""
    about = {"family": "airbench", "network": {"base": 1.0}, "data": {"name": "cifar10"}, "teacher": None}
    found = Frontier(folder, about, 1000)
    for name, (share, ms, runs) in designs.items():
        scheme = "dense" if name.startswith("dense") else "lr"
        timing = DesignTime(ms, ms, ms, 1.0, 256, "folded")
        made = [SeedRun(seed, int(1000 * share) + seed, 0, "", 3.0, 4.0, 1.0, 1.0, 0) for seed in range(runs)]
        found.rows.append(DesignRow({"name": name, "scheme": scheme}, int(1e6 * ms), 10**5, timing, runs=made))
    return found


def test_every_design_is_named_and_both_kinds_are_in_the_legend(tmp_path: Path):
    found = frontier(tmp_path, {"dense": (0.93, 1.0, 3), "dense@0.5": (0.9, 0.5, 3), "lr": (0.91, 0.4, 2)})
    text = draw_frontier(found, tmp_path / "f.svg").read_text()
    for word in ("dense@0.5", "low-rank, trained here", "Milliseconds for a batch", "Parameters"):
        assert f">{word}<" in text
    assert "Mean of 2 to 3 runs" in text


def test_networks_of_learned_shapes_have_a_colour_of_their_own(tmp_path: Path):
    found = frontier(tmp_path, {"dense": (0.93, 1.0, 2), "lr": (0.9, 0.5, 2), "learned-run": (0.92, 0.5, 2)})
    found.rows[2].design["scheme"] = "shapes:run/shapes.json"
    text = draw_frontier(found, tmp_path / "f.svg").read_text()
    assert ">learned shapes, trained here<" in text
    assert "#009e73" in text


def test_networks_without_a_time_are_drawn_by_their_cost(tmp_path: Path):
    found = frontier(tmp_path, {"dense": (0.93, 1.0, 2)})
    found.rows[0].timing = None
    text = draw_frontier(found, tmp_path / "f.svg").read_text()
    assert "Milliseconds" not in text
    assert ">Parameters<" in text


def test_a_record_without_runs_has_no_picture(tmp_path: Path):
    with pytest.raises(LowRankError, match="nothing to draw"):
        draw_frontier(frontier(tmp_path, {"dense": (0.9, 1.0, 0)}), "f.svg")
