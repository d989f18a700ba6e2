import pytest

from lowrank_cnn.paper.audit import (
    CONTRADICTED,
    MISSED,
    REPRODUCED,
    UNDECIDED,
    UNREPRODUCIBLE,
    UNTESTED,
    VERDICTS,
    Finding,
    LayerTimes,
    audit,
    summary,
)
from lowrank_cnn.paper.claims import ACCURACY_CLAIMS, COST_CLAIMS
from lowrank_cnn.paper.published import rows, timings

FINDINGS = audit()


def verdict(subject: str, quantity: str = "claim", table: str | None = None) -> str:
    (found,) = (f for f in FINDINGS if (f.subject, f.quantity) == (subject, quantity) and table in (None, f.table))
    return found.verdict


def test_no_row_and_no_claim_is_left_out():
    figures = [f for f in FINDINGS if f.table != "text"]
    for row in rows():
        quantities = {f.quantity for f in figures if (f.table, f.subject) == (row.table, row.network)}
        expected = {"macs", "params"} | {q for q in ("top1", "top5") if getattr(row, q) is not None}
        assert quantities == expected
    assert len([f for f in FINDINGS if f.table == "text"]) == len(COST_CLAIMS) + len(ACCURACY_CLAIMS) + 7
    assert sum(summary(FINDINGS).values()) == len(FINDINGS)


def test_a_figure_is_reproduced_only_when_it_is_equal():
    for finding in FINDINGS:
        if finding.quantity in ("macs", "params"):
            assert (finding.verdict == REPRODUCED) == (finding.published == finding.computed)


def test_what_the_audit_found():
    assert verdict("vgg11-gmp-lr", "macs", "vgg-ilsvrc") == REPRODUCED
    assert verdict("msra-c", "params") == REPRODUCED
    assert verdict("vgg11-gmp-lr-lde", "macs") == UNREPRODUCIBLE
    assert verdict("googlenet-lr", "macs") == REPRODUCED
    assert verdict("googlenet-lr-conv1", "macs") == REPRODUCED
    assert verdict("googlenet-lr", "params") == REPRODUCED
    assert verdict("vgg11-gmp-sf", "macs", "vgg-places") == UNREPRODUCIBLE
    assert verdict("nin-c3: 54% of the parameters") == CONTRADICTED
    assert verdict("lr-2x: 41% less compute than vgg11 (abstract)") == CONTRADICTED
    assert verdict("lde beats vgg11") == CONTRADICTED
    assert verdict("lr: a third of the compute of gmp") == REPRODUCED
    assert verdict("nin", "top1") == UNTESTED


def test_the_places_figures_are_a_quarter_of_the_ilsvrc_ones():
    by_table = {(row.table, row.network): row.macs for row in rows()}
    for name in ("vgg11-gmp", "vgg11-gmp-lr", "vgg11-gmp-lr-join"):
        assert 4 * by_table["vgg-places", name] == by_table["vgg-ilsvrc", name]
    full_head = by_table["vgg-ilsvrc", "vgg11"] - by_table["vgg-ilsvrc", "vgg11-gmp"]
    assert 4 * by_table["vgg-places", "vgg11-gmp-sf"] == by_table["vgg-ilsvrc", "vgg11-gmp-sf"] + full_head


def test_the_published_timings_are_read():
    assert len(timings()) == 16
    assert timings()[0].layer == "conv1x-1"


def test_accuracies_are_held_against_runs_where_there_are_any():
    findings = audit({("nin-cifar10", "nin", "top1"): (0.9188, 0.9190), ("nin-cifar10", "nin-c3", "top1"): (0.9,)})
    found = {f.subject: f.verdict for f in findings if f.quantity == "top1" and f.table == "nin-cifar10"}
    assert found == {"nin": REPRODUCED, "nin-c3": MISSED, "nin-c3-lr": UNTESTED}


def claim(text: str, accuracies: dict, **measured) -> Finding:
    (found,) = (f for f in audit(accuracies, **measured) if f.subject == text)
    return found


def test_runs_do_not_rescue_a_claim_that_the_papers_own_table_contradicts():
    ours = {("vgg-ilsvrc", name, "top5"): (0.880, 0.881) for name in ("vgg11-gmp", "vgg11-gmp-lr")}
    found = claim("lr matches gmp", ours)
    assert found.verdict == CONTRADICTED
    assert found.computed.startswith("+0.00 ±")


@pytest.mark.parametrize(
    ("nin", "low_rank", "verdict"),
    [
        ((0.918, 0.919, 0.920), (0.917, 0.918, 0.919), REPRODUCED),
        ((0.90, 0.92), (0.89, 0.93), UNDECIDED),
        ((0.90, 0.905), (0.60, 0.605), MISSED),
        ((0.918,), (0.917,), UNDECIDED),
        ((0.918, 0.919), (), UNTESTED),
    ],
)
def test_an_accuracy_claim_is_judged_by_its_interval_over_seeds(nin, low_rank, verdict):
    ours = {("nin-cifar10", "nin", "top1"): nin, ("nin-cifar10", "nin-c3-lr", "top1"): low_rank}
    found = claim("nin-c3-lr matches nin", {key: values for key, values in ours.items() if values})
    assert found.verdict == verdict


def test_over_fitting_is_judged_by_training_against_test_accuracy():
    ours = {
        ("nin-cifar10", "nin", "overfit"): (0.05, 0.051),
        ("nin-cifar10", "nin-c3-lr", "overfit"): (0.02, 0.021),
    }
    assert claim("nin-c3-lr over-fits less than nin", ours).verdict == REPRODUCED


def test_the_low_rank_googlenets_save_more_like_for_like():
    found = claim("googlenet-lr: compute saved, like for like", {})
    assert (found.computed, found.verdict) == ("32.4%", CONTRADICTED)
    assert "33.1%" in found.note


def test_claims_that_the_papers_own_figures_refute():
    assert claim("sf: separable (rank-1) filters", {}).computed == "rank 3"
    smallest = claim("googlenet-lr: almost 10 times smaller than any comparable network", {})
    assert (smallest.computed, smallest.verdict) == ("x 1.7", CONTRADICTED)


def test_several_crops_are_named_with_their_cost():
    (found,) = (f for f in FINDINGS if (f.subject, f.quantity) == ("googlenet-144-crop", "macs"))
    assert f"{144 * 1591056680:,}" in found.note


@pytest.mark.parametrize(("ms", "verdict"), [((1.0, 2.0, 4.0), REPRODUCED), ((3.0, 1.0, 2.0), MISSED)])
def test_measured_layers_decide_whether_macs_correlate_with_time(ms, verdict):
    text = "MACs correlate strongly with GPU time (measured here)"
    measured = [LayerTimes("nin", "GPU", (1.0, 2.0, 4.0), ms)]
    assert claim(text, {}, measured=measured).verdict == verdict
    assert claim(text, {}).verdict == UNTESTED


def test_disagreements_come_first():
    assert list(summary(FINDINGS)) == [v for v in VERDICTS if v in summary(FINDINGS)]
    assert VERDICTS[0] == CONTRADICTED
