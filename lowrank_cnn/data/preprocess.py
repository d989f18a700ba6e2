"""Preprocessing of every image, in training and afterwards: standardising or whitening."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError, check_choice, check_number
from lowrank_cnn.core.text import counted
from lowrank_cnn.data.types import Split

_CHUNK = 4096
_VALUES_AT_ONCE = 2**23
"""Values that the statistics hold in double precision: 64 MiB, or one image."""
_MIN_NORM = 1e-8
_MOST_VALUES = 2**14  # the matrix has the square of this many entries, in double precision


@dataclass(frozen=True, eq=False)
class Preprocess(ABC):
    """Takes uint8 images [n, C, H, W] or volumes and gives float32 of the same shape, on the same device."""

    @abstractmethod
    def __call__(self, images: Tensor) -> Tensor: ...

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def to_dict(self) -> dict[str, Tensor]:
        """Everything needed to build it again, as tensors for a checkpoint."""
        stored = vars(self).items()
        return {n: v.cpu() if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64) for n, v in stored}


@dataclass(frozen=True, eq=False)
class AsGiven(Preprocess):
    """Preprocessing of data that the user's own code has prepared: nothing is done to it.

    A checkpoint that holds this cannot say how a photograph becomes what the network takes.
    """

    def __call__(self, images: Tensor) -> Tensor:
        if images.is_floating_point():
            return images
        raise LowRankError(
            "this network was trained on tensors that your own code prepared: prepare images so and call it."
        )

    def to_dict(self) -> dict[str, Tensor]:
        return {"as_given": torch.ones(1)}


@dataclass(frozen=True, eq=False)
class Standardize(Preprocess):
    """Subtract a mean and divide by a deviation per channel, both in pixel values of 0 to 255."""

    mean: Tensor
    std: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        self.check(images.shape[1])
        return (images.float() - per_channel(self.mean, images)) / per_channel(self.std, images)

    def check(self, channels: int) -> None:
        """Refuse images that have another number of channels."""
        if channels != len(self.mean):
            raise LowRankError(f"images of {counted(channels, 'channel')} do not fit a mean of {len(self.mean)}.")

    @classmethod
    def fit(cls, split: Split) -> Standardize:
        """The statistics of a split: of all its images in memory, or of a sample where it is streamed."""
        count, total, squares = 0, torch.zeros(()), torch.zeros(())
        # Sums of whole numbers are exact in double precision, however the images are divided.
        for chunk in split.pixels():
            for images in chunk.split(max(1, _VALUES_AT_ONCE // max(1, chunk[:1].numel()))):
                values = images.transpose(0, 1).flatten(1).double()
                count += values.shape[1]
                total, squares = total + values.sum(1), squares + (values**2).sum(1)
        if not count:
            raise LowRankError("no image could be read to compute the mean from.")
        mean = total / count
        deviation = (squares / count - mean**2).clamp(min=0).sqrt()
        return cls(mean.float(), torch.where(deviation > 0, deviation, 1.0).float())


def per_channel(values: Tensor, images: Tensor) -> Tensor:
    """One value for each channel, in the axes of images [n, C, H, W] or volumes [n, C, D, H, W]."""
    return values.view(-1, *[1] * (images.ndim - 2))


@dataclass(frozen=True, eq=False)
class Whiten(Preprocess):
    """Global contrast normalisation, then ZCA whitening, both over the whole image: crops come after.

    Contrast: each image loses its mean and is scaled to a norm of `scale`. Whitening: with C the covariance
    of the normalised training images, `matrix` is (C + epsilon I)^(-1/2), the whitening nearest to identity.
    Scale 55 and epsilon 0.1 are those of Goodfellow et al. (2013), "Maxout networks".
    """

    mean: Tensor
    matrix: Tensor
    scale: float = 55.0
    epsilon: float = 0.1

    def __call__(self, images: Tensor) -> Tensor:
        if images[0].numel() != len(self.mean):
            raise LowRankError(f"images of {images[0].numel()} values do not fit whitening of {len(self.mean)}.")
        # In double precision, which autocast and TF32 leave alone; Apple's GPUs have none.
        work = torch.float32 if images.device.type == "mps" else torch.float64
        flat = normalise_contrast(images.flatten(1).to(work), scale=self.scale)
        white = (flat - self.mean.to(work)) @ self.matrix.to(work)
        return white.float().view(images.shape)

    @classmethod
    def fit(
        cls, split: Split, *, scale: float = 55.0, epsilon: float = 0.1, device: torch.device | str = "cpu"
    ) -> Whiten:
        """Computed from the training images in double precision, chunks of them passing over the device."""
        images = getattr(split, "images", None)
        if images is None:
            raise LowRankError("whitening needs a set small enough to be held in memory, of equal image sizes.")
        check_number("scale", scale, above=0)
        check_number("epsilon", epsilon, least=0)
        size = images[0].numel()
        check_number("the number of values of an image", size, most=_MOST_VALUES)
        # Apple's GPUs have no double precision.
        work = torch.device("cpu" if torch.device(device).type == "mps" else device)
        total = torch.zeros(size, dtype=torch.float64, device=work)
        products = torch.zeros(size, size, dtype=torch.float64, device=work)
        for chunk in images.split(_CHUNK):
            flat = normalise_contrast(chunk.to(work).flatten(1).double(), scale=scale)
            total += flat.sum(0)
            products.addmm_(flat.T, flat)
        mean = total / len(images)
        covariance = products / len(images) - torch.outer(mean, mean)
        values, vectors = torch.linalg.eigh(covariance)
        # Dimensions without variance (grey values of equal channels, constant borders) would divide by zero.
        floor = values[-1].clamp(min=1e-30) * size * torch.finfo(torch.float64).eps
        inverse = (values.clamp(min=0) + max(epsilon, float(floor))).rsqrt()
        matrix = (vectors * inverse) @ vectors.T
        return cls(mean.float().cpu(), matrix.float().cpu(), scale, epsilon).to(device)


def normalise_contrast(flat: Tensor, *, scale: float) -> Tensor:
    """Rows without their mean, scaled to the norm `scale`; a constant row becomes zero."""
    centred = flat - flat.mean(1, keepdim=True)
    norm = centred.norm(dim=1, keepdim=True) / scale
    return centred / torch.where(norm < _MIN_NORM, 1.0, norm)


def fit_preprocess(
    name: str, split: Split, *, device: torch.device | str = "cpu", epsilon: float = 0.1
) -> Preprocess:
    """The preprocessing of this name, computed from a training split; `epsilon` is that of whitening."""
    check_choice("preprocess", name, ("standardize", "whiten"))
    if name == "standardize":
        return Standardize.fit(split).to(device)
    return Whiten.fit(split, epsilon=epsilon, device=device)


def preprocess_from_dict(tensors: Mapping[str, Tensor]) -> Preprocess:
    """The preprocessing that a checkpoint holds, the inverse of `to_dict`."""
    if tensors.keys() == {"as_given"}:
        return AsGiven()
    kinds: tuple[Any, ...] = (Standardize, Whiten)
    for kind in kinds:
        if tensors.keys() == {field.name for field in fields(kind)}:
            return kind(**{name: value if value.dim() else float(value) for name, value in tensors.items()})
    raise LowRankError(f"no preprocessing is stored as {', '.join(sorted(tensors)) or 'nothing'}.")
