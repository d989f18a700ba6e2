from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_cnn.data.store import NO_LABEL, labelled_rows
from lowrank_cnn.data.types import Problems, rank_range
from lowrank_cnn.data.workers import WINDOW, epoch_lanes, lane_count


class Numbers:
    """A store whose random order is the stored one: what lanes add is seen alone."""

    def __init__(self, labels: list[int]) -> None:
        self.labels = torch.tensor(labels)

    def read(self, row: int) -> bytes:
        return bytes([row])

    def where(self, row: int) -> str:
        return f"row {row}"

    def shuffled(self, draw: torch.Generator) -> torch.Tensor:
        return torch.arange(len(self.labels))

    def fingerprint(self) -> str:
        return "numbers"

    def version(self) -> str:
        return "numbers"

    def keep(self, places: int, rows: int) -> None: ...


@given(st.integers(1, 64), st.integers(1, 12), st.integers(0, 12))
def test_lanes_divide_the_batch_and_the_processes(local: int, world: int, workers: int) -> None:
    batch = local * world
    lanes = lane_count(batch, world, workers)
    assert batch % lanes == 0
    assert lanes % world == 0


def test_lanes_do_not_depend_on_processes_up_to_sixteen() -> None:
    assert {lane_count(128, world, 16 // world) for world in (1, 2, 4, 8, 16)} == {16}
    assert lane_count(256, 8, 8) == 64
    assert lane_count(10, 1, 4) == 2


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(1, 700), st.integers(0, 3))
def test_lanes_hold_every_used_row_once_within_its_window(lanes: int, length: int, epoch: int) -> None:
    store = Numbers([0] * (lanes * length + 5))
    used = lanes * length
    rows = epoch_lanes(store, torch.arange(used + 5), lanes=lanes, used=used, seed=1, epoch=epoch)
    assert rows.shape == (lanes, length)
    assert sorted(rows.flatten().tolist()) == list(range(used))
    home = torch.arange(used).view(lanes, length)
    assert torch.equal(rows // length, home // length)  # each in its lane
    assert torch.equal(rows % length // WINDOW, home % length // WINDOW)  # and its window


def test_only_chosen_rows_are_read() -> None:
    rows = torch.arange(0, 100, 3)
    lanes = epoch_lanes(Numbers([0] * 100), rows, lanes=2, used=32, seed=0, epoch=0)
    assert set(lanes.flatten().tolist()) <= set(rows.tolist())
    assert len(lanes.flatten().unique()) == 32


@given(st.integers(0, 100), st.integers(1, 9))
def test_ranges_of_ranks_are_everything_once(n: int, world: int) -> None:
    ranges = [rank_range(n, rank, world) for rank in range(world)]
    assert [place for first, end in ranges for place in range(first, end)] == list(range(n))
    assert max(end - first for first, end in ranges) - min(end - first for first, end in ranges) <= 1


def test_wrong_labels_are_found() -> None:
    problems = Problems()
    assert labelled_rows(Numbers([0, -1, 2, 1, NO_LABEL]), 2, problems).tolist() == [0, 3]
    assert problems.examples == {"wrong label": ["row 1: -1", "row 2: 2", "row 4: none"]}
