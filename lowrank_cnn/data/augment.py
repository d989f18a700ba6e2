"""Crops, mirrors and cutouts: drawn on the CPU, applied to a whole epoch in one pass on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional

from lowrank_cnn.core.errors import LowRankError, check_number
from lowrank_cnn.data.types import generator
from lowrank_cnn.kernels.device import kernels_run


@dataclass(frozen=True)
class Augment:
    """How training images are varied.

    A crop smaller than the (padded) image lies anywhere in training and in the centre in evaluation.
    `resize` first brings the shorter side of every image to that length.
    Padding and cutouts hold zeros after preprocessing, that is, the mean colour.
    `alternate` mirrors an image every other epoch, half of the images in each, in place of by chance.
    """

    crop: int | None = None
    pad: int = 0
    mirror: bool = True
    cutout: int = 0
    resize: int | None = None
    alternate: bool = False

    def __post_init__(self) -> None:
        for name, least in (("crop", 1), ("resize", 1), ("pad", 0), ("cutout", 0)):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, least=least, whole=True)

    def window(self, height: int, width: int, *, train: bool) -> tuple[int, int]:
        """The height and width that the network sees of an image of this size."""
        height, width = scaled(height, width, self.resize)
        if self.crop is None:
            return height, width
        pad = self.pad if train else 0
        if self.crop > min(height, width) + 2 * pad:
            padded = f" padded by {pad}" if pad else ""
            raise LowRankError(f"a crop of {self.crop} does not fit images of {height}x{width}{padded}.")
        return self.crop, self.crop

    def for_any_size(self) -> Augment:
        """The same for images that differ in size, which must be scaled before they are cropped.

        Without `resize` their shorter side becomes 8/7 of the crop, which is 256 for 224.
        """
        if self.resize is not None:
            return self
        if self.crop is None:
            raise LowRankError(
                "these images differ in size: give all of them one (--image-size 64; in Python "
                "open_data(..., image_size=64)), or set the recipe's crop (--set crop=224)."
            )
        return replace(self, resize=round(self.crop * 8 / 7))


@dataclass(frozen=True)
class Moves:
    """The crop, mirror and cutout of each image: one number per image and field."""

    top: Tensor
    left: Tensor
    mirror: Tensor
    cut_y: Tensor
    cut_x: Tensor

    def __getitem__(self, index: Tensor | slice) -> Moves:
        return Moves(*(getattr(self, field.name)[index] for field in fields(self)))

    def to(self, device: torch.device) -> Moves:
        return Moves(*(send_to_device(getattr(self, field.name), device) for field in fields(self)))


@dataclass(frozen=True)
class ByteScale:
    """How images that are held as bytes become what the network sees: less the mean, over the deviation.

    The outer `pad` pixels of each image are padding and become zero.
    """

    mean: Tensor
    std: Tensor
    pad: int
    dtype: torch.dtype

    def __call__(self, images: Tensor) -> Tensor:
        """Bytes [..., C] as floats, padding included."""
        return ((images.float() - self.mean) / self.std).to(self.dtype)


def send_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, through pinned memory to a GPU, so that Python does not wait for it."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def draw_moves(
    n: int, *, padded: tuple[int, int], window: tuple[int, int], mirror: bool, draw: torch.Generator
) -> Moves:
    """Random moves for n images of the padded size; the same numbers are drawn whatever is switched on."""

    def below(limit: int) -> Tensor:
        return torch.randint(0, limit, (n,), generator=draw)

    top, left = below(padded[0] - window[0] + 1), below(padded[1] - window[1] + 1)
    turned = below(2).bool() & mirror
    return Moves(top, left, turned, below(window[0]), below(window[1]))


def alternating(rows: Tensor, *, images: int, seed: int, epoch: int) -> Tensor:
    """Whether to mirror each of these rows: a random half of the images, then the other half, by turns."""
    coins = torch.randint(0, 2, (images,), generator=generator("mirror", seed)).bool()
    return coins[rows] ^ bool(epoch % 2)


def apply_moves(
    images: Tensor,
    rows: Tensor,
    moves: Moves,
    *,
    window: tuple[int, int],
    cutout: int = 0,
    scale: ByteScale | None = None,
) -> Tensor:
    """Gather `rows` of padded images [N, H, W, C], each cropped, mirrored, scaled and cut, as [n, h, w, C].

    One pass, by a kernel on a GPU and else by indexing with coordinates: no image is visited by Python.
    """
    if kernels_run(images.device):
        from lowrank_cnn.kernels.crop import launch_crop

        places = (moves.top, moves.left, moves.mirror, moves.cut_y, moves.cut_x)
        scaling = (scale.mean, scale.std) if scale else None
        kind, pad = (scale.dtype, scale.pad) if scale else (images.dtype, 0)
        return launch_crop(
            images, rows, *places, window=window, cutout=cutout, scaling=scaling, pad=pad, dtype=kind
        )
    ys = torch.arange(window[0], device=images.device)
    xs = torch.arange(window[1], device=images.device)
    across = torch.where(moves.mirror[:, None], window[1] - 1 - xs, xs)
    source_y, source_x = moves.top[:, None] + ys, moves.left[:, None] + across
    out = images[rows[:, None, None], source_y[:, :, None], source_x[:, None, :]]
    out = scale(out) if scale else out
    if scale and scale.pad:
        height, width = images.shape[1:3]
        inside_y = (source_y >= scale.pad) & (source_y < height - scale.pad)
        inside_x = (source_x >= scale.pad) & (source_x < width - scale.pad)
        out.masked_fill_(~(inside_y[:, :, None] & inside_x[:, None, :])[..., None], 0)
    return out.masked_fill_(_holes(moves, window, cutout)[..., None], 0) if cutout else out


def cut_out(images: Tensor, moves: Moves, *, cutout: int) -> Tensor:
    """Zero a square in each of the images [n, C, h, w], in place."""
    window = (images.shape[2], images.shape[3])
    return images.masked_fill_(_holes(moves, window, cutout)[:, None], 0)


def _holes(moves: Moves, window: tuple[int, int], length: int) -> Tensor:
    """A mask [n, h, w] of the cut squares, clipped at the borders."""

    def near(centre: Tensor, places: int) -> Tensor:
        offset = torch.arange(places, device=centre.device) - (centre[:, None] - length // 2)
        return (offset >= 0) & (offset < length)

    return near(moves.cut_y, window[0])[:, :, None] & near(moves.cut_x, window[1])[:, None, :]


def scaled(height: int, width: int, shorter: int | None) -> tuple[int, int]:
    """The size where the shorter side has this length; the same size for None."""
    if shorter is None:
        return height, width
    scale = shorter / min(height, width)
    return max(shorter, round(height * scale)), max(shorter, round(width * scale))


def resize_shorter(images: Tensor, shorter: int | None) -> Tensor:
    """Float images [n, C, H, W] scaled by their shorter side."""
    size = scaled(images.shape[2], images.shape[3], shorter)
    if size == tuple(images.shape[2:]):
        return images
    return functional.interpolate(images, size, mode="bilinear", antialias=True)


def centre_crop(images: Tensor, window: tuple[int, int]) -> Tensor:
    """The middle of images [..., H, W]; an odd margin leaves its extra pixel below and to the right."""
    height, width = images.shape[-2:]
    if window[0] > height or window[1] > width:
        raise LowRankError(f"a window of {window[0]}x{window[1]} does not fit images of {height}x{width}.")
    top, left = (height - window[0]) // 2, (width - window[1]) // 2
    return images[..., top : top + window[0], left : left + window[1]]
