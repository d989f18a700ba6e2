"""How all figures look: colours that colour-blind readers can tell apart, marks, type and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowrank_cnn.system.errors import LowRankError, require

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

MARKS: dict[str, dict[str, Any]] = {
    "baseline": {"marker": "s", "facecolor": ORANGE, "edgecolor": "white"},
    "low-rank": {"marker": "o", "facecolor": BLUE, "edgecolor": "white"},
    "augmented": {"marker": "D", "facecolor": "white", "edgecolor": PINK},
    "ours": {"marker": "*", "facecolor": GREEN, "edgecolor": "white"},
}
LEGEND = {
    "baseline": "published, baseline",
    "low-rank": "published, low-rank",
    "augmented": "published, more augmentation",
    "ours": "trained here",
}

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
    """Draw within this, so that all figures look alike and nobody else's do."""
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


def new_axes(title: str, x: str, y: str, *, height: float = 3.2) -> tuple[Figure, Axes]:
    figure = new_figure(height=height)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def settle(figure: Figure) -> None:
    """Fix the layout as it is now: what is placed by the pixel after this stays where it was put."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def save(figure: Figure, out: str | Path) -> Path:
    """Write a figure in the format of its name, the same bytes every time."""
    out = Path(out)
    kind = out.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise LowRankError(f"a figure is written as {', '.join(FORMATS)}: {out} ends in none of them.")
    dateless = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with style():
            figure.savefig(out, metadata=dateless)
    except OSError as error:
        raise LowRankError(f"{out} cannot be written ({error.strerror}).") from error
    return out


def headline(figure: Figure, title: str) -> None:
    """A title over several panels, where a single one would have its own."""
    figure.suptitle(title, x=0.015, ha="left", fontsize=10, fontweight="bold")


def image_axes(axes: Axes) -> None:
    """Leave an image without ticks, grid and frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
