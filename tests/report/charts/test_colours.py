import itertools

import pytest

from lowrank_cnn.report import charts as layers
from lowrank_cnn.report.style import COOL, DENSE, LOW_RANK, WARM, kind_colours, network_looks

DEUTERANOPIA = ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969))
PROTANOPIA = ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052))
"""How a colour looks to readers without one kind of cone (Machado et al. 2009), on linear RGB."""


def linear(colour: str) -> list[float]:
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def lab(rgb: list[float]) -> list[float]:
    x, y, z = (
        sum(a * b for a, b in zip(row, rgb, strict=True)) / white
        for row, white in (
            ((0.4124, 0.3576, 0.1805), 0.9505),
            ((0.2126, 0.7152, 0.0722), 1.0),
            ((0.0193, 0.1192, 0.9505), 1.089),
        )
    )
    f = [max(v, 0.0) ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z)]
    return [116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])]


def contrast(one: str, other: str) -> float:
    dark, light = sorted(
        sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True)) for c in (one, other)
    )
    return (light + 0.05) / (dark + 0.05)


def least_distance(palette: list[str], eyes: tuple | None) -> float:
    seen = []
    for colour in palette:
        rgb = linear(colour)
        seen.append(lab(rgb if eyes is None else [sum(a * b for a, b in zip(r, rgb, strict=True)) for r in eyes]))
    return min(
        sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) ** 0.5 for p, q in itertools.combinations(seen, 2)
    )


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("eyes", [None, DEUTERANOPIA, PROTANOPIA])
def test_colours_are_distinct_to_colour_blind_readers(page, eyes):
    networks = [pair[page] for pair in (*WARM, *COOL)]
    assert least_distance(networks, eyes) > 20  # what is just seen apart side by side is 2.3
    assert least_distance(list(layers.LAYER_COLOURS.values()), eyes) > 20


@pytest.mark.parametrize(("page", "background"), [(0, "#ffffff"), (1, "#181d23")])
def test_colours_stand_out_from_the_page(page, background):
    assert min(contrast(pair[page], background) for pair in (*WARM, *COOL)) > 2.9


def test_the_first_network_of_a_kind_has_the_colour_of_its_kind():
    looks = network_looks({"a": False, "b": True, "c": False, "d": True})
    assert (looks["a"]["light"], looks["a"]["dark"]) == LOW_RANK == tuple(kind_colours(dense=False).values())
    assert (looks["b"]["light"], looks["b"]["dark"]) == DENSE == tuple(kind_colours(dense=True).values())


def test_dense_networks_are_warm_and_low_rank_ones_cool():
    looks = network_looks({f"network {i}": i % 2 == 0 for i in range(40)})
    for i, name in enumerate(f"network {i}" for i in range(40)):
        red, _, blue = linear(str(looks[name]["light"]))
        assert (red > blue) == (i % 2 == 0)


def test_no_two_of_many_networks_look_alike():
    looks = network_looks({f"network {i}": i < 10 for i in range(35)})
    assert len({(look["light"], tuple(look["dash"])) for look in looks.values()}) == 35
