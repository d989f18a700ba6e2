from __future__ import annotations

import pytest
import torch

from lowrank_cnn.choose.verdict import compare, resampled_gaps
from lowrank_cnn.core.numbers import student_t


def answers(runs: int, share: float, seed: int, *, noise: float = 0.1) -> torch.Tensor:
    hard = torch.rand(2000, generator=torch.Generator().manual_seed(0))  # the same images for all
    draw = torch.Generator().manual_seed(seed)
    offsets = 0.02 * torch.randn(runs, 1, generator=draw)  # some runs are luckier than others
    return hard + noise * torch.randn(runs, 2000, generator=draw) + offsets < share


def by_hand(ours: torch.Tensor, theirs: torch.Tensor, resamples: int) -> torch.Tensor:
    """The plain bootstrap: draw images, then runs, and average."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(resamples):
        images = torch.randint(0, ours.shape[1], (ours.shape[1],), generator=draw)
        means = []
        for side in (ours, theirs):
            runs = torch.randint(0, len(side), (len(side),), generator=draw)
            means.append(side[runs][:, images].double().mean())
        found.append(100 * (means[0] - means[1]))
    return torch.stack(found)


def test_resampling_spreads_as_the_plain_bootstrap_does():
    ours, theirs = answers(12, 0.9, 1), answers(12, 0.88, 2)
    fast, plain = resampled_gaps(ours, theirs, resamples=4000, seed=0), by_hand(ours, theirs, 400)
    assert fast.mean() == pytest.approx(float(plain.mean()), abs=0.2)
    # Twelve runs in the plain bootstrap show 11/12 of the variance between runs.
    assert float(plain.std()) == pytest.approx(float(fast.std()), rel=0.15)


def test_machines_that_choose_other_signs_of_eigenvectors_find_the_same(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = answers(4, 0.9, 1), answers(4, 0.88, 2)
    here = resampled_gaps(ours, theirs, resamples=100, seed=0)
    decomposed = torch.linalg.eigh

    def flipped(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = decomposed(matrix)
        return values, vectors * torch.tensor([1.0, -1.0]).repeat(4)

    monkeypatch.setattr(torch.linalg, "eigh", flipped)
    torch.testing.assert_close(resampled_gaps(ours, theirs, resamples=100, seed=0), here)


def test_images_met_by_both_tell_more_than_images_of_each():
    ours, theirs = answers(8, 0.9, 1, noise=0.01), answers(8, 0.9, 2, noise=0.01)
    shuffled = theirs[:, torch.randperm(2000)]
    paired, apart = (resampled_gaps(ours, b, resamples=2000, seed=0).std() for b in (theirs, shuffled))
    assert paired < 0.9 * apart


def test_a_gap_that_is_there_is_found_and_one_that_is_not_is_not():
    same = compare(answers(16, 0.9, 1), answers(16, 0.9, 2), margin=0.0, alpha=0.01)
    assert same.low < 0 < same.high
    assert same.p > 0.01
    better = compare(answers(16, 0.95, 1), answers(16, 0.85, 2), margin=0.2, alpha=0.01)
    assert better.low > 0.2
    assert better.p < 0.001
    assert better.points == pytest.approx(10, abs=2.5)


def test_two_runs_of_each_say_next_to_nothing_and_no_nonsense():
    gap = compare(answers(2, 0.95, 1), answers(2, 0.9, 2), margin=0.0, alpha=0.01)
    assert -100 <= gap.low < -10 < 10 < gap.high <= 100


def test_runs_of_one_seed_alone_can_be_compared():
    gap = compare(answers(1, 0.95, 1), answers(1, 0.9, 2), margin=0.0, alpha=0.01)
    assert gap.low < gap.points < gap.high


@pytest.mark.parametrize("runs", [4, 16])
def test_a_gap_of_nothing_is_seldom_found(runs: int):
    """Few runs do not tell how much runs differ: a plain bootstrap of four claims a gap too often."""
    trials, alpha = 120, 0.1
    gaps = [
        compare(answers(runs, 0.9, 2 * n), answers(runs, 0.9, 2 * n + 1), margin=0.0, alpha=alpha, resamples=300)
        for n in range(trials)
    ]
    assert sum(gap.p < alpha for gap in gaps) <= 1.5 * alpha * trials
    assert sum(not gap.low < 0 < gap.high for gap in gaps) <= 1.5 * alpha * trials


def test_the_spread_of_seeds_is_that_of_students_t():
    """Where images add nothing: a gap of two designs whose runs differ, and whose images are all alike."""
    share = torch.tensor([0.2, 0.4, 0.5, 0.9, 0.6])
    ours = torch.arange(1000) < 1000 * share[:, None]
    gaps = resampled_gaps(
        ours.repeat_interleave(1000, 1), ours[:1].repeat_interleave(1000, 1), resamples=40000, seed=0
    )
    found = (torch.quantile(gaps, 0.975) - torch.quantile(gaps, 0.025)) / 2
    reach = student_t(0.975, 4) * 100 * float(share.std()) / 5**0.5
    assert float(found) == pytest.approx(reach, rel=0.12)
