"""Images of stripes, on which the right shape of filters is known."""

from __future__ import annotations

import torch

from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.graph.finalize_shapes import LearnedShapes


def stripes(count: int, *, side: int = 16, noise: float = 160.0) -> Data:
    """Noisy images whose rows are square waves of random phase; the class is the wavelength.

    Rows are independent, so only taps along a row separate the classes.
    """

    def split(seed: int) -> ResidentSplit:
        draw = torch.Generator().manual_seed(seed)
        labels = torch.arange(count) % 4
        places = torch.randint(0, 24, (count, side, 1), generator=draw) + torch.arange(side)
        waves = (places // (1 + labels)[:, None, None] % 2).float()[:, None]
        images = 64 + 128 * waves + noise * torch.randn(waves.shape, generator=draw)
        return ResidentSplit.of(images.clamp(0, 255).to(torch.uint8), labels)

    return Data("stripes", ("1", "2", "3", "4"), split(0), split(1))


def rows_share(shapes: LearnedShapes) -> float:
    """The share of filters that are wider than high."""
    groups = [(shape.split("x"), n) for scheme in shapes.layers.values() for shape, n in scheme.shapes]
    spatial = [(int(w) > int(h), n) for (h, w), n in groups if (h, w) != ("1", "1")]
    return float(sum(n for wide, n in spatial if wide) / max(1, sum(n for _, n in spatial)))
