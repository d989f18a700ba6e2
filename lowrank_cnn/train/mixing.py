"""Mixup and CutMix: batches whose images are blends of two, with the labels of both."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lowrank_cnn.data.augment import send_to_device
from lowrank_cnn.data.types import generator
from lowrank_cnn.system.errors import require


class Mixer:
    """Blends each image of a batch with another by mixup or CutMix; if both are on, chance decides for each batch.

    Zhang et al. (2018), "mixup"; Yun et al. (2019), "CutMix". Draws depend only on the seed, the epoch and the
    batch, so that a resumed run sees the same blends.
    """

    def __init__(self, mixup: float, cutmix: float, classes: int, *, seed: int, rank: int = 0) -> None:
        self.mixup, self.cutmix, self.classes = mixup, cutmix, classes
        self.seed, self.rank = seed, rank

    def __call__(self, images: Tensor, labels: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        """The blended images, and for each the probabilities of the classes."""
        draw = generator("mix", self.seed, epoch, batch, self.rank)
        order = send_to_device(torch.randperm(len(images), generator=draw), images.device)
        use_cutmix = self.cutmix > 0 and (self.mixup == 0 or float(torch.rand((), generator=draw)) < 0.5)
        share = _beta(self.cutmix if use_cutmix else self.mixup, draw)
        if use_cutmix:
            images, share = _pasted(images, order, share, draw)
        else:
            images = torch.lerp(images[order], images, share)
        targets = functional.one_hot(labels, self.classes).float()
        return images, torch.lerp(targets[order], targets, share)


def _beta(alpha: float, draw: torch.Generator) -> float:
    """A share drawn from Beta(alpha, alpha) by NumPy, since torch's own distribution takes no generator."""
    numpy = require("numpy", extra="train", purpose="mixing images")
    seed = int(torch.randint(2**31, (), generator=draw))
    return float(numpy.random.default_rng(seed).beta(alpha, alpha))


def _pasted(images: Tensor, order: Tensor, share: float, draw: torch.Generator) -> tuple[Tensor, float]:
    """A box of the other image over each, and the share of the own pixels that are left."""
    height, width = images.shape[2:]
    box = (round(height * (1 - share) ** 0.5), round(width * (1 - share) ** 0.5))
    centre = (torch.rand(2, generator=draw) * torch.tensor([height, width])).long().tolist()
    top, left = (max(0, centre[side] - box[side] // 2) for side in (0, 1))
    bottom, right = min(height, top + box[0]), min(width, left + box[1])
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[order][:, :, top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)
