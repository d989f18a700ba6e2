import pytest

from lowrank_cnn.paper.accuracy import MISSED, REPRODUCED, UNDECIDED, UNTESTED, hold_claim, hold_figure
from lowrank_cnn.paper.claims import CLAIMS
from lowrank_cnn.paper.published import published

(CLAIM,) = (claim for claim in CLAIMS if claim.text == "nin-c3-lr: 0.1 points below nin")


@pytest.mark.parametrize(
    ("runs", "verdict", "note"),
    [
        ((), UNTESTED, ""),
        ((0.9188,), REPRODUCED, "+0.00 points, one run; reproduced if at most 0.3 below."),
        ((0.9158,), REPRODUCED, "-0.30 points, one run; reproduced if at most 0.3 below."),
        ((0.9157,), MISSED, "-0.31 points, one run; reproduced if at most 0.3 below."),
        ((0.9150, 0.9170), REPRODUCED, "-0.28 points, mean of 2 runs, standard deviation 0.14;"),
        ((0.93, 0.93, 0.93), REPRODUCED, "+1.12 points, mean of 3 runs, standard deviation 0.00;"),
    ],
)
def test_an_accuracy_is_reproduced_when_its_runs_come_near(runs: tuple[float, ...], verdict: str, note: str):
    shown, found, why = hold_figure(0.9188, runs)
    assert found == verdict
    assert why.startswith(note)
    assert shown == (f"{100 * sum(runs) / len(runs):.2f}%" if runs else "")


def claimed(
    nin: tuple[float, ...], low_rank: tuple[float, ...], **others: tuple[float, ...]
) -> tuple[str, str, str]:
    runs = {"nin": nin, "nin-c3-lr": low_rank, **others}
    ours = {("nin-cifar10", network, "top1"): values for network, values in runs.items()}
    ours[("vgg-ilsvrc", "vgg11", "top1")] = ours[("nin-cifar10", "nin", "top5")] = (0.1, 0.9)  # another question
    return hold_claim(CLAIM, published()["nin-c3-lr"], published()["nin"], ours)


@pytest.mark.parametrize(
    ("nin", "low_rank", "verdict"),
    [
        ((0.918, 0.919, 0.920), (0.917, 0.918, 0.919), REPRODUCED),
        ((0.918, 0.919, 0.920), (0.9145, 0.9155, 0.9165), MISSED),  # 0.25 from the claim, 0.23 is the reach
        ((0.918, 0.919, 0.920), (0.9149, 0.9159, 0.9169), REPRODUCED),  # 0.21 from it
        ((0.918, 0.919, 0.920), (0.921, 0.922, 0.923), MISSED),
        ((0.90, 0.92), (0.89, 0.93), UNDECIDED),
        ((0.90, 0.92), (0.60, 0.62), MISSED),
        ((0.918,), (0.917,), UNDECIDED),
        ((0.918, 0.919), (), UNTESTED),
        ((), (0.918, 0.919), UNTESTED),
    ],
)
def test_a_claimed_gap_lies_within_what_the_seeds_leave_open(nin: tuple, low_rank: tuple, verdict: str):
    assert claimed(nin, low_rank)[1] == verdict


def test_the_interval_is_that_of_all_networks_of_the_table():
    nin, low_rank = (0.918, 0.919, 0.920), (0.917, 0.918, 0.919)
    # Student's t for 4 degrees of freedom, 2.78, times 0.1 points, times the root of 1/3 + 1/3
    assert claimed(nin, low_rank) == ("-0.10 points", REPRODUCED, " Here ± 0.23 to 95%, over 3 and 3 runs.")
    # for 6 degrees of freedom 2.45, times the root of (2 x 0.01 + 2 x 0.01 + 2 x 0.04) / 6
    assert "± 0.28" in claimed(nin, low_rank, **{"nin-c3": (0.920, 0.922, 0.924)})[2]
    assert "over 2 and 4 runs" in claimed((0.918, 0.919, 0.920, 0.921), (0.918, 0.919))[2]
