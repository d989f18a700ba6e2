"""The colours of networks, the same in every chart: dense networks are orange, low-rank ones blue.

Where a chart has several networks of a kind, the first has the colour of its kind and the others are of its hue:
warm for dense networks, cool for low-rank ones. All are distinct to readers with any of the common colour
deficiencies, and stand out from the page.
"""

from __future__ import annotations

from collections.abc import Mapping

Look = dict[str, str | list[int]]
"""How a network is drawn: its colour on light and on dark pages, and its dash."""

DENSE, LOW_RANK, LEARNED = ("#d55e00", "#ff9a52"), ("#0072b2", "#56b4e9"), ("#009e73", "#35d3a3")
"""Of each kind of network trained here, on light and on dark pages."""
WARM = (DENSE, ("#403500", "#a64f32"), ("#a6896c", "#f2b39d"))
COOL = (LOW_RANK, ("#3019a6", "#9326ff"), ("#203a40", "#a6f8ff"), ("#0000ff", "#3966bf"), ("#000040", "#46818c"))
DASHES = ([1, 0], [7, 4], [2, 3], [9, 3, 2, 3], [12, 4], [1, 5])
"""Networks beyond the last colour begin with the first again, in another dash."""


def kind_colours(*, dense: bool) -> dict[str, str]:
    """The colour of a kind on light and on dark pages."""
    return dict(zip(("light", "dark"), DENSE if dense else LOW_RANK, strict=True))


def network_looks(networks: Mapping[str, bool]) -> dict[str, Look]:
    """A colour and a dash of its own for each network of a chart, from its name and whether it is dense.

    >>> network_looks({"nin": True, "nin-c3": False})["nin"]
    {'light': '#d55e00', 'dark': '#ff9a52', 'dash': [1, 0]}
    """
    found: dict[str, Look] = {}
    for dense, hues in ((True, WARM), (False, COOL)):
        for place, name in enumerate(name for name, kind in networks.items() if kind == dense):
            light, dark = hues[place % len(hues)]
            found[name] = {"light": light, "dark": dark, "dash": DASHES[place // len(hues) % len(DASHES)]}
    return found
