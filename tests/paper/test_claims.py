import math
from statistics import stdev

import pytest

from lowrank_cnn.models import list_models
from lowrank_cnn.paper.claims import (
    ACCURACY_CLAIMS,
    COST_CLAIMS,
    FAILS,
    HOLDS,
    UNDECIDED,
    Scores,
    answer_claims,
    rank_agreement,
    standard_error,
)
from lowrank_cnn.paper.published import published

VGG = [name for name in list_models() if name.startswith("vgg")]


def scores(**ours):
    """Published figures of some networks (dashes as underscores), and ours."""
    named = {name.replace("_", "-"): value for name, value in ours.items()}
    return [Scores(name, published()[name].top1, value, published()[name].macs) for name, value in named.items()]


def answers(found):
    return answer_claims({"top1": found})["top1"]


def test_a_gap_comes_with_the_error_of_the_difference_of_two_means():
    (gap,) = answers(scores(vgg11_gmp=(0.60, 0.62), vgg11_gmp_lr=(0.605, 0.615)))
    deviation = math.sqrt((stdev((0.60, 0.62)) ** 2 + stdev((0.605, 0.615)) ** 2) / 2)
    assert gap.question == "lr matches gmp"
    assert gap.ours == pytest.approx(0.0)
    assert gap.error == pytest.approx(100 * deviation * math.sqrt(1 / 2 + 1 / 2))
    assert gap.half_width == pytest.approx(gap.error * 4.303, rel=1e-3)
    assert gap.published == pytest.approx(100 * (0.67608 - 0.685))
    assert gap.mac_ratio == pytest.approx(0.335, abs=0.001)


def judged(claim: str, gap: float, *, spread: float = 0.004, seeds: int = 6) -> str:
    """The verdict on a claim, from runs of two networks a gap apart, each half of them a spread up or down."""
    (asked,) = (c for c in ACCURACY_CLAIMS if c.text == claim)
    base = tuple(0.6 + spread * (-1) ** i for i in range(seeds))
    ours = tuple(value + gap / 100 for value in base)
    (found,) = (g for g in answers(scores_of({asked.base: base, asked.network: ours})) if g.question == claim)
    return found.verdict


def scores_of(runs, recipe=""):
    return [Scores(name, published()[name].top1, v, published()[name].macs, recipe) for name, v in runs.items()]


@pytest.mark.parametrize(
    ("claim", "gap", "verdict"),
    [
        ("wfull beats gmp", 2.0, HOLDS),
        ("wfull beats gmp", 0.2, UNDECIDED),
        ("wfull beats gmp", -2.0, FAILS),
        ("sf loses a little against gmp", -1.0, HOLDS),
        ("sf loses a little against gmp", -2.0, UNDECIDED),
        ("sf loses a little against gmp", -5.0, FAILS),
        ("sf loses a little against gmp", 2.0, FAILS),
        ("lr matches gmp", 0.5, HOLDS),
        ("lr matches gmp", -1.0, UNDECIDED),
        ("lr matches gmp", 5.0, HOLDS),
        ("lr matches gmp", -3.0, FAILS),
        ("lr equals lr-join: the join may be unnecessary", 0.0, HOLDS),
        ("lr equals lr-join: the join may be unnecessary", 3.0, FAILS),
    ],
)
def test_a_verdict_needs_the_whole_interval(claim, gap, verdict):
    assert judged(claim, gap) == verdict


def test_runs_without_any_spread_still_get_an_answer():
    assert judged("wfull beats gmp", 1.0, spread=0.0) == HOLDS
    assert judged("wfull beats gmp", 0.0, spread=0.0) == FAILS


def test_single_seeds_decide_nothing():
    (gap,) = answers(scores(vgg11_gmp=(0.60,), vgg11_gmp_lr=(0.10,)))
    assert (gap.error, gap.p, gap.verdict) == (None, None, UNDECIDED)


def test_a_network_with_one_seed_borrows_the_deviation_of_the_others():
    found = answers(scores(vgg11_gmp=(0.60, 0.61), vgg11_gmp_lr=(0.30,), vgg11_gmp_sf=(0.5, 0.51)))
    by_network = {gap.network: gap for gap in found}
    assert by_network["vgg11-gmp-lr"].error > by_network["vgg11-gmp-sf"].error


def test_the_spread_of_another_recipe_is_not_borrowed():
    quiet = scores_of({"vgg11-gmp": (0.600, 0.602), "vgg11-gmp-lr": (0.590, 0.592)}, "vgg")
    loud = scores_of({"googlenet": (0.50, 0.56), "googlenet-lr": (0.50, 0.56)}, "googlenet")
    alone, beside = answers(quiet), answers([*quiet, *loud])
    assert beside[0].error == alone[0].error
    mixed, freedom = standard_error(quiet[0], loud[0], [*quiet, *loud])
    assert mixed == pytest.approx(100 * math.sqrt(0.002**2 / 2 / 2 + 0.06**2 / 2 / 2))
    assert 2 <= freedom < 2.1  # Welch: nearly all of the error, and so of the freedom, is GoogLeNet's


def test_many_claims_are_corrected_together():
    close = {"vgg11-gmp": (0.600, 0.602, 0.604), "vgg11-gmp-lr-join-wfull": (0.606, 0.608, 0.610)}
    (alone,) = answers(scores_of(close))
    assert alone.verdict == HOLDS
    both = answer_claims({"top1": scores_of(close), "top5": scores_of(close)})
    assert both["top1"][0].p == pytest.approx(2 * alone.p)


def test_over_fitting_is_asked_of_its_own_measure_alone():
    asked = {gap.question for gap in answers(scores(vgg11_gmp=(0.6, 0.61), vgg11_gmp_lr=(0.6, 0.61)))}
    assert asked == {"lr matches gmp"}
    runs = dict.fromkeys(("vgg11-gmp", "vgg11-gmp-lr"), (0.1, 0.12))
    (gap,) = answer_claims({"overfit": scores_of(runs)})["overfit"]
    assert gap.question == "lr over-fits less than gmp"


def test_the_paper_answers_its_own_claims_as_it_says():
    """Every expectation agrees in sign with the published table; matches lie within a point or nearly so."""
    for claim in ACCURACY_CLAIMS:
        if claim.measure != "overfit":
            gap = 100 * (published()[claim.network].top1 - published()[claim.base].top1)
            low, high = {"above": (0, 9), "below": (-2, 0)}.get(claim.expected, (-1.05, 1.05))
            assert low < gap < high, claim


def test_the_published_order_agrees_with_itself():
    found = rank_agreement(scores(**{name.replace("-", "_"): (published()[name].top1,) for name in VGG}))
    assert (found.n, found.pairs, found.alike) == (8, 28, 28)
    assert found.rank_correlation == pytest.approx(1)
    assert found.linear_correlation == pytest.approx(1)


def test_a_reversed_order_disagrees():
    found = rank_agreement(scores(**{name.replace("-", "_"): (1 - published()[name].top1,) for name in VGG}))
    assert found.alike == 0
    assert found.rank_correlation == pytest.approx(-1)


def test_an_order_of_equals_says_nothing():
    found = rank_agreement(scores(vgg11=(0.5,), vgg11_gmp=(0.5,), vgg11_gmp_sf=(0.5,)))
    assert (found.alike, found.rank_correlation) == (0, None)


def test_a_cost_claim_rounds_as_the_text_does():
    (claim,) = (c for c in COST_CLAIMS if c.text == "nin-c3: 26% less compute")
    assert claim.value(74, 100) == pytest.approx(26)
    assert claim.holds(26.4)
    assert not claim.holds(26.6)
    (over,) = (c for c in COST_CLAIMS if c.at_least)
    assert over.holds(75.1)
    assert not over.holds(75.0)
