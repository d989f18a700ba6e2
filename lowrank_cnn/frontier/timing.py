"""How long a design takes: inference through `optimize`, beside the dense network in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.optimizing import Optimized, optimize
from lowrank_cnn.frontier.designs import DENSE, STEP, Builder, Design
from lowrank_cnn.frontier.record import DesignTime
from lowrank_cnn.system.clock import measure

REPEATS = 21


@dataclass
class DesignClock:
    """Times designs on one device, each in turns with the dense network of the family, which it keeps.

    `precision` is that of weights and images: bf16 on a GPU, as networks are trained there, else fp32.
    """

    builder: Builder
    device: torch.device
    batch: int = 256
    compile: bool = True
    repeats: int = REPEATS
    say: Callable[[str], None] | None = None
    reference: Optimized | None = field(default=None, init=False)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def time(self, design: Design) -> DesignTime:
        """The fastest form of a design, and its time."""
        images = self._images()
        ours = self._optimized(design, images)
        if design == DENSE:
            self.reference = ours
        reference = self.reference or self._optimized(DENSE, images)
        self.reference = reference
        runs = {"ours": lambda: ours(images), "dense": lambda: reference(images)}
        times = measure(runs, repeats=self.repeats, cuda=images.is_cuda)
        sample, tries = times["ours"], {name: one.ms for name, one in ours.report.times.items()}
        # The dense network beside itself: what two clocks differ by is not a ratio.
        other = sample.ms if design == DENSE else times["dense"].ms
        return DesignTime(sample.ms, sample.low, sample.high, other, self.batch, ours.report.choice, tries)

    def _images(self) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(self.batch, *self.builder.size, generator=draw)
        layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        return images.to(self.device, self.dtype, memory_format=layout)

    def _optimized(self, design: Design, images: Tensor) -> Optimized:
        torch.manual_seed(0)
        network: nn.Module = self.builder(design).to(self.device, self.dtype).eval()
        return optimize(network, images, compile=self.compile, repeats=self.repeats, say=self.say)


def width_of_time(measured: dict[float, float], target: float) -> float:
    """The width at which a design would take `target`, between and beyond the widths that were measured.

    Time is taken for a power of the width between two neighbours; the result is a multiple of `STEP`.
    """
    points = sorted((log(width), log(ms)) for width, ms in measured.items())
    if len(points) == 1:
        points.append((points[0][0] + 1, points[0][1] + 2))  # time grows with the square of the width
    pairs = list(pairwise(points))
    low, high = next((pair for pair in pairs if pair[1][1] >= log(target)), pairs[-1])
    slope = max((high[1] - low[1]) / (high[0] - low[0]), 0.1)  # a flat stretch would lead anywhere
    width = exp(low[0] + (log(target) - low[1]) / slope)
    return min(4.0, max(STEP, round(width / STEP) * STEP))
