import pytest

from lowrank_cnn.paper.audit import CONTRADICTED, MISSED, REPRODUCED, UNREPRODUCIBLE, UNTESTED, audit, summary
from lowrank_cnn.paper.claims import CLAIMS
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
    assert len([f for f in FINDINGS if f.table == "text"]) == len(CLAIMS) + 2
    assert sum(summary(FINDINGS).values()) == len(FINDINGS)


def test_a_figure_is_reproduced_only_when_it_is_equal():
    for finding in FINDINGS:
        if finding.quantity in ("macs", "params"):
            assert (finding.verdict == REPRODUCED) == (finding.published == finding.computed)


def test_what_the_audit_found():
    assert verdict("vgg11-gmp-lr", "macs", "vgg-ilsvrc") == REPRODUCED
    assert verdict("msra-c", "params") == REPRODUCED
    assert verdict("vgg11-gmp-lr-lde", "macs") == UNREPRODUCIBLE
    assert verdict("googlenet-lr", "macs") == UNREPRODUCIBLE
    assert verdict("googlenet-lr", "params") == REPRODUCED
    assert verdict("vgg11-gmp-sf", "macs", "vgg-places") == UNREPRODUCIBLE
    assert verdict("nin-c3: 54% of the parameters") == CONTRADICTED
    assert verdict("lr-2x: 41% less compute than vgg11 (abstract)") == CONTRADICTED
    assert verdict("lde: 2.5 points of top-5 over vgg11") == CONTRADICTED
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


def claimed(nin: tuple[float, ...], low_rank: tuple[float, ...]) -> str:
    """The verdict on the claim that nin-c3-lr is 0.1 points below nin."""
    trained = {("nin-cifar10", "nin", "top1"): nin, ("nin-cifar10", "nin-c3-lr", "top1"): low_rank}
    (found,) = (finding for finding in audit(trained) if finding.subject == "nin-c3-lr: 0.1 points below nin")
    return found.verdict


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ((), UNTESTED),
        ((0.9188,), REPRODUCED),
        ((0.9160, 0.9158), REPRODUCED),
        ((0.9160, 0.9154), MISSED),
        ((0.95, 0.96), REPRODUCED),
    ],
)
def test_an_accuracy_is_reproduced_when_the_mean_of_its_runs_comes_near(runs: tuple[float, ...], verdict: str):
    findings = audit({("nin-cifar10", "nin", "top1"): runs})
    found = {f.subject: f for f in findings if f.quantity == "top1" and f.table == "nin-cifar10"}
    assert found["nin"].verdict == verdict
    assert found["nin-c3"].verdict == UNTESTED
    assert not runs or str(len(runs)) in found["nin"].note


def test_a_claimed_gap_must_lie_within_what_the_seeds_leave_open():
    assert claimed((0.918, 0.919, 0.920), (0.917, 0.918, 0.919)) == REPRODUCED
    assert claimed((0.918, 0.919, 0.920), (0.908, 0.909, 0.910)) == MISSED
    assert claimed((0.918, 0.919, 0.920), (0.928, 0.929, 0.930)) == MISSED
    assert claimed((0.90, 0.92), (0.89, 0.93)) == REPRODUCED
    assert claimed((0.918,), (0.917,)) == UNTESTED
    assert claimed((0.918, 0.919), ()) == UNTESTED


def test_no_runs_save_a_claim_that_the_papers_own_table_contradicts():
    trained = {
        ("vgg-ilsvrc", "vgg11-gmp", "top5"): (0.880, 0.881),
        ("vgg-ilsvrc", "vgg11-gmp-lr", "top5"): (0.880, 0.881),
    }
    (found,) = (f for f in audit(trained) if f.subject == "lr: no loss of accuracy against gmp")
    assert (found.verdict, found.computed) == (CONTRADICTED, "+0.00 points")
