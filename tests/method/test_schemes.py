"""Schemes: their texts, shares and bounds, the layers that they build, and filter groups as data."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import SCHEMES, Scheme, build_conv, parse_scheme
from lowrank_cnn.method.spec import Composite, FilterGroup

SHAPES = st.sampled_from(["kx1", "1xk", "kxk", "1x1", "5x1", "1x7", "kx3"])
PROPORTIONS = st.fractions(min_value=Fraction(1, 20), max_value=20)
MIXES = st.dictionaries(SHAPES, PROPORTIONS, min_size=1, max_size=5).map(lambda mix: tuple(mix.items()))
AMOUNTS = st.one_of(st.integers(1, 500), st.floats(0.05, 4))


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    name = draw(st.sampled_from(sorted(SCHEMES)))
    if name == "dense":
        return Scheme("dense")
    if name == "bands":
        odd = st.sampled_from(["identity", "3x3", "1x11", "11x1", "kxk", "kx1"])
        mix = draw(st.dictionaries(odd, st.fractions(Fraction(1, 20), 20), min_size=1))
        return Scheme(name, tuple(mix.items()))
    if name == "cp":
        return Scheme("cp", m=draw(AMOUNTS))
    if name == "channel":
        return Scheme("channel", SCHEMES["channel"].shapes, draw(AMOUNTS), 1.0)
    if name == "separable":
        halves = draw(st.permutations((("kx1", Fraction(1)), ("1x5", Fraction(2)))))
        return Scheme(name, tuple(halves), draw(AMOUNTS))
    if name == "2+1":
        return Scheme(name, draw(st.permutations(SCHEMES[name].shapes)), draw(AMOUNTS))
    if name in ("exact", "learned"):
        mix = draw(st.dictionaries(SHAPES, st.integers(1, 99), min_size=1))
        shapes = tuple((shape, Fraction(count if name == "exact" else 1)) for shape, count in mix.items())
        return Scheme(name, shapes, multiple=draw(st.integers(1, 99)) if name == "learned" else None)
    to = {
        "lr": None,
        "lr-join": 1.0,
        "mixture": draw(st.sampled_from([None, 1.0])),
        "embed": draw(st.floats(0.05, 2)),
    }
    parts = draw(st.sampled_from([1, 2, 8])) if name != "embed" else 1
    branches = parts == 1 and name != "embed" and draw(st.booleans())
    m = draw(AMOUNTS) if to[name] else None
    return Scheme(name, draw(MIXES), m, to[name], channel_groups=parts, branches=branches)


@given(schemes())
def test_a_scheme_round_trips_through_its_string(scheme: Scheme):
    assert parse_scheme(str(scheme)) == scheme


def test_any_share_has_a_text_that_can_be_read_again():
    long = Fraction(123583440667049046007, 6179172033352452320)
    scheme = Scheme("mixture", (("kx1", long), ("kxk", Fraction(0.1))))
    assert parse_scheme(str(scheme)) == scheme
    assert dict(scheme.shapes)["kxk"] == Fraction(1, 10)


@given(schemes(), st.integers(1, 300), st.sampled_from([(3, 3), (5, 5), (7, 3), (1, 3)]))
def test_no_filter_is_lost(scheme: Scheme, filters: int, kernel: tuple[int, int]):
    if scheme.name == "learned":
        with pytest.raises(LowRankError, match="learned in training"):
            scheme.stages(kernel, filters)
        return
    if scheme.name == "bands":
        with pytest.raises(LowRankError, match="is for depthwise"):
            scheme.stages(kernel, filters + 1)
        filters *= 400
        assert scheme.stages(kernel, filters, channel_groups=filters)[0].filters == filters
        return
    parts = scheme.channel_groups
    filters *= parts
    stages = scheme.stages(kernel if 2 in scheme.dimensions else (3, *kernel), filters)
    assert all(group.filters % parts == 0 for group in stages[0].groups)
    assert stages[-1].filters == scheme.out_filters(filters)
    if len(stages) in (2, 4):
        share = 1.0 if scheme.m is None else scheme.m
        expected = share if isinstance(share, int) else max(1, round(share * filters))
        assert abs(stages[0].filters - expected) < parts


@given(MIXES, st.integers(1, 40), st.sampled_from([1, 2, 4]))
def test_shares_follow_the_proportions_to_one_unit(mix: tuple, units: int, unit: int):
    (composite,) = Scheme("mixture", mix).stages((3, 3), units * unit, channel_groups=unit)
    assert composite.filters == units * unit
    unit = 1 if composite.depthwise else unit  # a filter to a channel
    total = sum(proportion for _, proportion in mix)
    got = {}
    for group in composite.groups:
        assert group.filters % unit == 0
        got[group.height, group.width] = got.get((group.height, group.width), 0) + group.filters
    want: dict[tuple[int, int], Fraction] = {}
    for shape, proportion in mix:
        size = tuple(3 if axis == "k" else int(axis) for axis in shape.split("x"))
        want[size] = want.get(size, Fraction(0)) + composite.filters * proportion / total
    for size, exact in want.items():
        assert abs(got.get(size, 0) - exact) < 2 * unit  # two shapes of a mix may coincide for this kernel


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("dense", ["3x3,64"]),
        ("separable", ["1x3,64", "3x1,64"]),
        ("separable(kx1, 1xk, m=16)", ["3x1,16", "1x3,64"]),
        ("lr", ["3x1,32 + 1x3,32"]),
        ("lr-join", ["3x1,32 + 1x3,32", "1x1,64"]),
        ("lr-join(m=0.5)", ["3x1,16 + 1x3,16", "1x1,64"]),
        ("mixture(kx1=3, 1xk=3, kxk=2, join)", ["3x1,24 + 1x3,24 + 3x3,16", "1x1,64"]),
        ("mixture(kx1, 1xk, 5x5=0.5)", ["3x1,26 + 1x3,25 + 5x5,13"]),
        ("embed", ["3x1,32 + 1x3,32", "1x1,32"]),
        ("embed(to=0.25)", ["3x1,32 + 1x3,32", "1x1,16"]),
    ],
)
def test_the_papers_schemes(text: str, stages: list[str]):
    assert [str(stage) for stage in parse_scheme(text).stages((3, 3), 64)] == stages


def test_one_basis_filter_is_not_as_many_as_filters():
    one, all_of_them = parse_scheme("lr-join(m=1)"), parse_scheme("lr-join(m=1.0)")
    assert one.stages((3, 3), 64)[0].filters == 1
    assert all_of_them == parse_scheme("lr-join") != one
    assert parse_scheme(str(one)) == one


def test_a_scheme_made_by_hand_is_checked():
    with pytest.raises(LowRankError, match="there is no scheme"):
        Scheme("foo")
    with pytest.raises(LowRankError, match="cannot join to"):
        Scheme("lr", (("kx1", Fraction(1)),), to=0.5)
    with pytest.raises(LowRankError, match="at most 1,000,000,000, not 1e\\+308"):
        Scheme("embed", (("kx1", Fraction(1)),), to=1e308)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr-joi", "did you mean lr-join"),
        ("lr(m=4)", "takes branches, channel_groups and shapes, not m"),
        ("embed(too=1)", "takes m, to"),
        ("mixture(kx1=-1)", "must be positive"),
        ("mixture(kx1=many)", "not a number"),
        ("lr(kx1", "cannot read the scheme"),
        ("lr(kx1, kx1)", "given twice"),
        ("separable(kxk, 1xk)", "two shapes along different axes"),
        ("dense(kx1)", "takes no shapes"),
        ("embed(to=0)", "must be a number above 0"),
        ("channel(kx1)", "takes m alone"),
        ("mixture(kx1, join=maybe)", "join takes no value in a scheme"),
        ("lr-join(m=1e400)", "not a number up to"),
        ("lr(branches, channel_groups=2)", "either branches or channel_groups"),
        ("lr(branches=perhaps)", "branches takes no value in a scheme"),
        ("separable(branches)", "takes m and shapes, not branches"),
        ("lr(channel_groups=0)", "channel_groups in the scheme lr must be a number above 0"),
        ("lr(channel_groups=0.5)", "channel_groups in a scheme is a whole number"),
        ("mixture(kx1, m=4)", "need a join"),
        ("cp(kx1)", "takes m alone"),
        ("separable(1xk, 1x5)", "two shapes along different axes"),
        (None, "a string or a Scheme"),
        ("mixture(to=0.5)", "takes branches, channel_groups, join, m"),
    ],
)
def test_bad_schemes_are_refused_in_a_sentence(text: str, says: str):
    with pytest.raises(LowRankError, match=says):
        parse_scheme(text)


@pytest.mark.parametrize(
    "text",
    [
        "lr(kx1=1e9999999)",
        "embed(to=1e400)",
        "lr-join(m=1e10)",
        "lr(kx1=1/0)",
        "separable(m=1e-999999999)",
        "mixture(kx1=" + "9" * 5000 + ")",
        "lr(" + "9" * 5000 + "x1)",
        "embed(to=inf)",
        "embed(to=nan)",
    ],
    ids=lambda text: text[:30],
)
def test_numbers_without_measure_are_refused_at_once(text: str):
    with pytest.raises(LowRankError, match=r"number|shape|characters|positive|options|takes"):
        parse_scheme(text)


def test_a_composites_arithmetic():
    composite = Composite.of([(3, 1, 8), FilterGroup(1, 5, 4)])
    assert composite.filters == 12
    assert composite.kernel == (3, 5)
    assert composite.fan_out == 3 * 8 + 5 * 4
    assert composite.weights(10) == 10 * 44


def test_filters_of_one_to_three_sides_and_depthwise_ones():
    assert [FilterGroup(*sizes).taps for sizes in ((5, 8), (3, 1, 8), (3, 3, 3, 8))] == [5, 3, 27]
    assert FilterGroup(7, 7, 96, depthwise=True).weights(96) == 49 * 96
    assert FilterGroup(60, depthwise=True).weights(60) == 0
    with pytest.raises(LowRankError, match="has 2-D filters, not 3,8"):
        CompositeConv2d(8, [FilterGroup(3, 8)])


@pytest.mark.parametrize("group", [(0, 3, 4), (3, 3, -1), (3,), (3, 3, 3, 3, 8), (3, 3, 1.5)])
def test_bad_groups_are_refused(group: tuple):
    with pytest.raises(LowRankError, match="filter group"):
        Composite.of([group])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: parse_scheme("lr").stages((3, 3), 10, channel_groups=4), "cannot be divided"),
        (lambda: build_conv(8, -4, 3, "lr-join"), "the number of filters must be a whole number of at least 1"),
        (lambda: build_conv(8, 8, 3, "lr", channel_groups=0), "channel_groups must be a whole number of"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(make, says: str):
    with pytest.raises(LowRankError, match=says):
        make()
