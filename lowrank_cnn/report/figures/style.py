"""How all figures look: colours that colour-blind readers can tell apart, marks, type and sizes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lowrank_cnn.system.errors import LowRankError, require
from lowrank_cnn.system.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "pdf", "png")
COLUMN = 6.6
"""The width of a figure that spans the text, in inches."""

INK, SOFT, GRID = "#16191d", "#4a525c", "#dfe3e8"
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
CYCLE = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY)
"""After Okabe and Ito: distinct to readers with any of the common colour deficiencies."""

_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.dpi": 200,
    "figure.dpi": 100,
    "svg.fonttype": "none",  # text stays text: it can be searched, read aloud and set in another type
    "svg.hashsalt": "lowrank-cnn",
    "pdf.fonttype": 42,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in the style of our figures, and restore the user's style afterwards."""
    matplotlib = require("matplotlib", extra="plots", purpose="drawing a figure")
    with matplotlib.rc_context(_STYLE):
        yield


def new_figure(width: float = COLUMN, height: float = 3.2) -> Figure:
    """An empty figure that belongs to no window."""
    module = require("matplotlib.figure", extra="plots", purpose="drawing a figure")
    agg = require("matplotlib.backends.backend_agg", extra="plots", purpose="drawing a figure")
    figure = module.Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.09, h_pad=0.09)
    agg.FigureCanvasAgg(figure)  # a canvas that can measure text, whatever format is written in the end
    return figure


def check_format(out: Path) -> str:
    """The format that a file's name asks for; refused where figures are not written in it."""
    kind = "svg" if str(out) == "-" else out.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise LowRankError(f"a figure is written as {', '.join(FORMATS)}: {out} ends in none of them.")
    return kind


def save(figure: Figure, out: Path) -> Path:
    """Write a figure in the format of its name, in one move and the same bytes every time."""
    kind = check_format(out)
    dateless = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    drawn = io.BytesIO()
    with style():
        figure.savefig(drawn, format=kind, metadata=dateless)
    write_atomically(out, drawn.getvalue())
    return out


def title_over(figure: Figure, title: str) -> None:
    """A title over several panels, where a single one would have its own."""
    figure.suptitle(title, x=0.015, ha="left", fontsize=10, fontweight="bold")


def image_axes(axes: Axes) -> None:
    """Leave an image without ticks, grid and frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
