from lowrank_cnn.paper.accuracy import MISSED, REPRODUCED, UNTESTED
from lowrank_cnn.paper.audit import CONTRADICTED, UNREPRODUCIBLE, audit, summary
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


def test_accuracies_are_held_against_runs_where_there_are_any():
    findings = audit({("nin-cifar10", "nin", "top1"): (0.9188, 0.9190), ("nin-cifar10", "nin-c3", "top1"): (0.9,)})
    found = {f.subject: f.verdict for f in findings if f.quantity == "top1" and f.table == "nin-cifar10"}
    assert found == {"nin": REPRODUCED, "nin-c3": MISSED, "nin-c3-lr": UNTESTED}


def test_no_runs_save_a_claim_that_the_papers_own_table_contradicts():
    ours = {
        ("vgg-ilsvrc", "vgg11-gmp", "top5"): (0.880, 0.881),
        ("vgg-ilsvrc", "vgg11-gmp-lr", "top5"): (0.880, 0.881),
    }
    (found,) = (f for f in audit(ours) if f.subject == "lr: no loss of accuracy against gmp")
    assert (found.verdict, found.computed) == (CONTRADICTED, "+0.00 points")
