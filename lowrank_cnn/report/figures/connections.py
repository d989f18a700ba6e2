"""Which input pixel reaches which output pixel: the connections of a dense, a conv and a low-rank layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowrank_cnn.report.figures.options import FigureOptions
from lowrank_cnn.report.figures.style import BLUE, COLUMN, CYCLE, GREEN, GRID, ORANGE, SOFT, new_figure
from lowrank_cnn.system.errors import require
from lowrank_cnn.system.text import TIMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDE = 6
"""Pixels along a side of the image: its connections are the square of its square."""

NINE = (BLUE, "#7d8792", CYCLE[5], CYCLE[4], ORANGE, "#8c564b", GREEN, "#6a4fb3", CYCLE[3])


def draw_connections(_name: str, _options: FigureOptions) -> Figure:
    """A column per layer: the pixels that one output sees, and below it the map of all connections."""
    figure = new_figure(COLUMN, 3.3)
    grid = figure.add_gridspec(2, 4, height_ratios=(1, 2.2))
    for column, (title, matrix) in enumerate(layers().items()):
        weights, links = int(matrix.unique().count_nonzero()), int(matrix.count_nonzero())
        above, below = figure.add_subplot(grid[0, column]), figure.add_subplot(grid[1, column])
        centre = matrix[SIDE * (SIDE // 2) + SIDE // 2].reshape(SIDE, SIDE)
        above.set_title(f"({'abcd'[column]}) {title}", fontsize=8.5)
        _paint(above, centre, weights)
        _paint(below, matrix, weights)
        below.set_xlabel(f"input pixel\n{weights:,} weights\n{links:,} connections", fontsize=8)
        if column == 0:
            above.set_ylabel("seen by\none output", fontsize=8)
            below.set_ylabel("output pixel", fontsize=8)
    return figure


def layers() -> dict[str, Tensor]:
    """The connection matrix of each kind of layer on one channel: equal numbers share a weight, zero is none."""
    pixels = SIDE * SIDE
    return {
        "fully connected": torch.arange(1, pixels * pixels + 1).reshape(pixels, pixels),
        f"3{TIMES}3 conv": connection_matrix(3, 3),
        f"3{TIMES}1 filter": connection_matrix(3, 1),
        f"1{TIMES}3 filter": connection_matrix(1, 3),
    }


def connection_matrix(height: int, width: int) -> Tensor:
    """[output pixels, input pixels] of a conv with "same" padding, whose taps are numbered from one.

    It is the conv itself, run on every image that has a single pixel set.
    """
    taps = torch.arange(1.0, height * width + 1).reshape(1, 1, height, width)
    images = torch.eye(SIDE * SIDE).reshape(-1, 1, SIDE, SIDE)
    reached = F.conv2d(images, taps, padding=(height // 2, width // 2))
    return reached.flatten(1).T.round().long()


def _paint(axes: Axes, matrix: Tensor, weights: int) -> None:
    colors: Any = require("matplotlib.colors", extra="plots", purpose="drawing a figure")
    shown = matrix.float().masked_fill(matrix == 0, float("nan")).numpy()
    many = weights > len(NINE)
    taps = NINE if weights == len(NINE) else (BLUE, ORANGE, GREEN)
    palette: Any = "viridis" if many else colors.ListedColormap(taps)
    low, high = (int(matrix.min()), int(matrix.max())) if many else (1, len(taps))
    axes.imshow(shown, cmap=palette, vmin=low, vmax=high, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xticks([edge - 0.5 for edge in range(1, matrix.shape[1])], minor=True)
    axes.set_yticks([edge - 0.5 for edge in range(1, matrix.shape[0])], minor=True)
    axes.grid(False)
    axes.grid(True, which="minor", color=GRID if not many else "white", linewidth=0.3)
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set(visible=True, color=SOFT, linewidth=0.6)
