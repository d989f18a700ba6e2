"""The network to take: the rule, the sentence, and how often it is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowrank_cnn.choose.choice import Contender, Wish, choose, milliseconds
from lowrank_cnn.choose.frontier import DENSE_NAME as DENSE
from lowrank_cnn.choose.frontier import LOW_RANK, THIN, load_frontier
from lowrank_cnn.core.errors import LowRankError

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "frontier"


def contender(kind: str, ms: float, accuracy: float, *, images: int = 1000, runs: int = 3) -> Contender:
    """A network whose runs all answer the same, so that accuracies are what they are called."""
    right = torch.zeros(runs, images, dtype=torch.bool)
    right[:, : round(accuracy * images)] = True
    names = {DENSE: "dense", THIN: "thin at 0.5", LOW_RANK: "lr"}
    return Contender(names[kind], kind, ms, accuracy, right)


@pytest.mark.parametrize(
    ("thin", "low_rank", "wish", "sentence"),
    [
        # thin wins: it is better in as much time, and close to dense
        (
            (3.1, 0.914),
            (3.0, 0.902),
            Wish(),
            "Take thin at 0.5: 91.4% in 3.1 ms. lr has 90.2% in 3.0 ms; dense 91.9% in 6.0 ms (3 runs each; "
            "thin at 0.5 over lr +1.2, 95%: +0.5 to +1.9).",
        ),
        # low rank wins
        (
            (3.1, 0.902),
            (3.0, 0.915),
            Wish(),
            "Take lr: 91.5% in 3.0 ms. thin at 0.5 has 90.2% in 3.1 ms; dense 91.9% in 6.0 ms (3 runs each; "
            "lr over thin at 0.5 +1.3, 95%: +0.6 to +2.0).",
        ),
        # both lose: they are more than a point below dense
        (
            (3.1, 0.85),
            (3.0, 0.84),
            Wish(),
            "Take dense: 91.9% in 6.0 ms. thin at 0.5 has 85.0% in 3.1 ms (3 runs each; dense over thin at 0.5 "
            "+6.9, 95%: +5.3 to +8.5).",
        ),
        # level
        (
            (3.0, 0.914),
            (3.0, 0.914),
            Wish(),
            "Take thin at 0.5: 91.4% in 3.0 ms. lr has 91.4% in 3.0 ms; dense 91.9% in 6.0 ms (3 runs each; "
            "undecided: thin at 0.5 over lr +0.0, 95%: +0.0 to +0.0).",
        ),
        # a wish for time
        (
            (3.1, 0.85),
            (2.9, 0.84),
            Wish(at_most=3.0),
            "Take lr: 84.0% in 2.9 ms. thin at 0.5 has 85.0% in 3.1 ms; dense 91.9% in 6.0 ms (3 runs each; "
            "lr over thin at 0.5 -1.0, 95%: -1.6 to -0.4).",
        ),
        # a wish for accuracy that nothing fulfils
        (
            (3.1, 0.85),
            (2.9, 0.84),
            Wish(at_least=0.95),
            "None reaches 95%: the best has 91.9% of the images held out. Take dense: 91.9% in 6.0 ms. "
            "thin at 0.5 has 85.0% in 3.1 ms (3 runs each; dense over thin at 0.5 +6.9, 95%: +5.3 to +8.5).",
        ),
    ],
)
def test_the_sentence(thin: tuple, low_rank: tuple, wish: Wish, sentence: str):
    rows = [contender(DENSE, 6.0, 0.919), contender(THIN, *thin), contender(LOW_RANK, *low_rank)]
    assert choose(rows, wish).sentence == sentence


@pytest.mark.parametrize(
    ("wish", "taken"),
    [
        (Wish(), "thin at 0.5"),
        (Wish(at_most=3.05), "lr"),
        (Wish(at_most=100.0), "dense"),
        (Wish(at_most=1.0), "lr"),  # nothing is that fast
        (Wish(at_least=0.9), "lr"),
        (Wish(at_least=0.912), "thin at 0.5"),
        (Wish(at_most=4.0, at_least=0.912), "thin at 0.5"),
    ],
)
def test_the_wish_decides(wish: Wish, taken: str):
    rows = [contender(DENSE, 6.0, 0.919), contender(THIN, 3.3, 0.914), contender(LOW_RANK, 3.0, 0.902)]
    assert choose(rows, wish).taken.name == taken


def test_of_equally_fast_networks_the_better_is_taken():
    rows = [contender(THIN, 3.0, 0.910), contender(LOW_RANK, 3.1, 0.915)]
    assert choose(rows, Wish()).taken.name == "lr"


@pytest.mark.parametrize(
    ("record", "better", "worse"),
    [
        ("tiny-vgg", "dense-64s-branches@0.75", "dense"),  # 53.7 and 50.6%
        ("tiny-vgg", "lr-branches", "dense-64s@0.625"),  # 52.3 and 49.0%
        ("tiny", "dense", "dense-64s@0.5"),  # 59.3 and 56.7%
    ],
)
def test_a_gap_of_three_points_is_seen_on_250_images(record: str, better: str, worse: str):
    """Comparisons drawn from recorded runs: 250 test images, three runs, each with 250 others held out."""
    found, draw, images, trials = load_frontier(RECORDS / record), torch.Generator().manual_seed(0), 250, 300
    answers = {name: found.right_answers(row) for name in (better, worse) if (row := found.row(name))}
    right = decided_wrongly = 0
    for _ in range(trials):
        parts = torch.randperm(found.images, generator=draw).split(images)
        rows = []
        for name, kind in ((better, THIN), (worse, LOW_RANK)):
            runs = answers[name][torch.randperm(len(answers[name]), generator=draw)[:3]]
            held_out = [runs[k, parts[1 + k]].double().mean().item() for k in range(3)]
            rows.append(Contender(name, kind, 3.0, sum(held_out) / 3, runs[:, parts[0]]))
        choice = choose(rows, Wish())
        right += choice.taken.name == better
        decided_wrongly += choice.decided and choice.gap.points * (1 if choice.taken.name == better else -1) < 0
    assert right >= 0.95 * trials  # so the worse one is taken in 5% at most
    assert decided_wrongly <= 0.02 * trials


@pytest.mark.parametrize(
    ("ours", "theirs", "images", "told"),
    [
        ((0.91, 0.93, 0.95), (0.88, 0.90, 0.92), 20_000, "4 runs each would decide between thin and lr"),
        ((0.90, 0.92, 0.94), (0.89, 0.91, 0.93), 20_000, "It would take about 32 runs each to decide"),
        ((0.91, 0.91, 0.91), (0.90, 0.90, 0.90), 100, "these 100 test images cannot tell 1.0 points apart"),
        ((0.95, 0.95, 0.95), (0.85, 0.85, 0.85), 1000, ""),  # it is decided
    ],
)
def test_what_would_decide_is_said(ours: tuple, theirs: tuple, images: int, told: str):
    rows = [
        Contender(name, kind, 3.0, sum(shares), torch.arange(images) < images * torch.tensor(shares)[:, None])
        for name, kind, shares in (("thin", THIN, ours), ("lr", LOW_RANK, theirs))
    ]
    choice = choose(rows, Wish(), minutes=lambda runs: 2.0 * runs)
    assert choice.decided is not bool(told)
    assert told in choice.more


@pytest.mark.parametrize("wrong", [{"at_most": 0}, {"at_most": float("nan")}, {"at_least": 90}, {"at_least": 0}])
def test_wishes_that_make_no_sense_are_refused(wrong: dict):
    with pytest.raises(LowRankError, match=r"at_most|at_least"):
        Wish(**wrong)


@pytest.mark.parametrize(
    ("ms", "text"), [(0.0, "0 ms"), (12.34, "12.3 ms"), (9.96, "10.0 ms"), (1234.5, "1234 ms")]
)
def test_times_have_the_digits_that_can_be_measured(ms: float, text: str):
    assert milliseconds(ms) == text
