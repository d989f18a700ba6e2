from __future__ import annotations

from collections.abc import Callable

import pytest

from lowrank_cnn.frontier.picture import draw_frontier, front_of
from lowrank_cnn.frontier.record import Frontier
from lowrank_cnn.system.errors import LowRankError


def test_every_design_is_named_and_both_kinds_are_in_the_legend(make_frontier: Callable[..., Frontier]):
    found = make_frontier({"dense": (0.93, 1.0, 3), "dense@0.5": (0.9, 0.5, 3), "lr": (0.91, 0.4, 2)})
    text = draw_frontier(found, found.folder / "f.svg").read_text()
    for word in ("dense@0.5", "low-rank", "front", "ms for a batch", "multiply-accumulates", "parameters"):
        assert f">{word}<" in text
    assert "mean of 2 to 3 runs" in text


def test_networks_without_a_time_are_drawn_by_their_cost(make_frontier: Callable[..., Frontier]):
    found = make_frontier({"dense": (0.93, 1.0, 2)})
    found.rows[0].timing = None
    text = draw_frontier(found, found.folder / "f.svg").read_text()
    assert "ms for a batch" not in text
    assert ">parameters<" in text


def test_a_record_without_runs_has_no_picture(make_frontier: Callable[..., Frontier]):
    with pytest.raises(LowRankError, match="nothing to draw"):
        draw_frontier(make_frontier({"dense": (0.9, 1.0, 0)}), "f.svg")


def test_the_front_is_what_no_other_beats():
    assert front_of([(3, 5), (1, 2), (2, 1), (2, 4), (4, 5)]) == [(1, 2), (2, 4), (3, 5)]
