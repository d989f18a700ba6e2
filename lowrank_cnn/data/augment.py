"""Augmentation: drawn on the CPU, applied on the device, crops to a whole epoch and colours to a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from lowrank_cnn.core.errors import LowRankError, check_number, option, require, setting
from lowrank_cnn.data.preprocess import Preprocess, Standardize
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
        """The same for images that differ in size: without `resize` their shorter side becomes 8/7 of the crop."""
        if self.resize is not None:
            return self
        if self.crop is None:
            raise LowRankError(
                f"these images differ in size: give all of them one ({option('image_size', 64)}), or set the "
                f"recipe's crop ({setting('crop', 224)})."
            )
        return replace(self, resize=round(self.crop * 8 / 7))


@dataclass(frozen=True)
class ByteScale:
    """From images held as bytes to what the network sees: (bytes - mean) / std, 0 in the outer `pad` pixels."""

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
) -> Tensor:
    """Random moves [5, n] for n images: top and left of the crop, mirrored or not, y and x of the cutout.

    The same numbers are drawn whatever is switched on.
    """

    def below(limit: int) -> Tensor:
        return torch.randint(0, limit, (n,), generator=draw)

    top, left = below(padded[0] - window[0] + 1), below(padded[1] - window[1] + 1)
    return torch.stack([top, left, below(2) * mirror, below(window[0]), below(window[1])])


def alternating(rows: Tensor, *, images: int, seed: int, epoch: int) -> Tensor:
    """Whether to mirror each of these rows: a random half of the images, then the other half, by turns."""
    coins = torch.randint(0, 2, (images,), generator=generator("mirror", seed)).bool()
    return coins[rows] ^ bool(epoch % 2)


def apply_moves(
    images: Tensor,
    rows: Tensor,
    moves: Tensor,
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

        scaling = (scale.mean, scale.std) if scale else None
        kind, pad = (scale.dtype, scale.pad) if scale else (images.dtype, 0)
        return launch_crop(
            images, rows, *moves, window=window, cutout=cutout, scaling=scaling, pad=pad, dtype=kind
        )
    top, left, mirror, _, _ = moves
    ys = torch.arange(window[0], device=images.device)
    xs = torch.arange(window[1], device=images.device)
    across = torch.where(mirror.bool()[:, None], window[1] - 1 - xs, xs)
    source_y, source_x = top[:, None] + ys, left[:, None] + across
    out = images[rows[:, None, None], source_y[:, :, None], source_x[:, None, :]]
    out = scale(out) if scale else out
    if scale and scale.pad:
        height, width = images.shape[1:3]
        inside_y = (source_y >= scale.pad) & (source_y < height - scale.pad)
        inside_x = (source_x >= scale.pad) & (source_x < width - scale.pad)
        out.masked_fill_(~(inside_y[:, :, None] & inside_x[:, None, :])[..., None], 0)
    return out.masked_fill_(_holes(moves, window, cutout)[..., None], 0) if cutout else out


def cut_out(images: Tensor, moves: Tensor, *, cutout: int) -> Tensor:
    """Zero a square in each of the images [n, C, h, w], in place."""
    window = (images.shape[2], images.shape[3])
    return images.masked_fill_(_holes(moves, window, cutout)[:, None], 0)


def _holes(moves: Tensor, window: tuple[int, int], length: int) -> Tensor:
    """A mask [n, h, w] of the cut squares, clipped at the borders."""

    def near(centre: Tensor, places: int) -> Tensor:
        offset = torch.arange(places, device=centre.device) - (centre[:, None] - length // 2)
        return (offset >= 0) & (offset < length)

    return near(moves[3], window[0])[:, :, None] & near(moves[4], window[1])[:, None, :]


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


# Zooms, colour jitter, TrivialAugment, RandAugment, mixup and CutMix for a whole batch on the device.
#
# torchvision's transforms draw from the global generator and treat a batch as one image. Here each image has its
# own draws, made on the CPU from the seed, the epoch and the batch: a resumed run sees the same images.

AUTO_AUGMENTS = ("none", "trivial", "rand")
_RAND_OPERATIONS, _RAND_STRENGTH = 2, 0.3
_GREY = (0.299, 0.587, 0.114)

Operation = Callable[[Tensor, Tensor], Tensor]
"""Images [n, C, H, W] in 0 to 1 and a signed strength for each [n], to images."""


@dataclass(frozen=True)
class PixelAugment:
    """How batches are varied beyond crops and mirrors.

    `zoom` is the least share of an image's area that a random crop shows before it is scaled back (1: none).
    `jitter` is how far brightness, contrast and saturation may move (0: not at all).
    `auto` is none, trivial (one random operation of random strength) or rand (two of one strength).
    """

    zoom: float = 1.0
    jitter: float = 0.0
    auto: str = "none"

    @property
    def active(self) -> bool:
        return self.zoom < 1 or self.jitter > 0 or self.auto != "none"

    def check(self, preprocess: Preprocess) -> None:
        """Refuse preprocessing that mixes pixels: colours cannot be changed after it."""
        if self.active and not isinstance(preprocess, Standardize):
            raise LowRankError("zoom, jitter and auto_augment need preprocess=standardize.")

    @torch.no_grad()
    def __call__(self, images: Tensor, preprocess: Standardize, *keys: int | str) -> Tensor:
        """The batch varied; `keys` decide the draws. Images come and go as the preprocessing leaves them."""
        draw, device = generator("pixels", *keys), images.device
        mean, std = (
            send_to_device(t.cpu(), device)[:, None, None] / 255 for t in (preprocess.mean, preprocess.std)
        )
        pixels = images.float() * std + mean
        if self.zoom < 1:
            pixels = _warp(pixels, send_to_device(_zooms(len(images), self.zoom, draw), device))
        if self.jitter:
            for name in ("brightness", "contrast", "saturation"):
                strength = (torch.rand(len(images), generator=draw) * 2 - 1) * self.jitter
                pixels = OPERATIONS[name](pixels, send_to_device(strength, device))
        if self.auto != "none":
            pixels = _automatic(pixels, self.auto, draw)
        last = images.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        return ((pixels - mean) / std).to(images.dtype).contiguous(memory_format=layout)


def _automatic(pixels: Tensor, kind: str, draw: torch.Generator) -> Tensor:
    """One operation of any strength for each image, or two of one strength."""
    for _ in range(1 if kind == "trivial" else _RAND_OPERATIONS):
        chosen = torch.randint(len(OPERATIONS), (len(pixels),), generator=draw)
        drawn = torch.rand(len(pixels), generator=draw) * 2 - 1
        strength = drawn if kind == "trivial" else drawn.sign() * _RAND_STRENGTH
        for number, operation in enumerate(OPERATIONS.values()):
            members = (chosen == number).nonzero()[:, 0]
            if len(members):
                places = send_to_device(members, pixels.device)
                changed = operation(pixels[places], send_to_device(strength[members], pixels.device))
                pixels = pixels.index_copy(0, places, changed.clamp(0, 1))
    return pixels


def _zooms(n: int, least: float, draw: torch.Generator) -> Tensor:
    """Affine maps [n, 2, 3] that show a random part of each image, of an area from `least` to all of it."""
    area = torch.rand(n, generator=draw) * (1 - least) + least
    ratio = torch.exp((torch.rand(n, generator=draw) * 2 - 1) * math.log(4 / 3))
    height, width = (area / ratio).sqrt().clamp(max=1), (area * ratio).sqrt().clamp(max=1)
    down, across = ((torch.rand(n, generator=draw) * 2 - 1) * (1 - side) for side in (height, width))
    zero = torch.zeros(n)
    return torch.stack([torch.stack([width, zero, across], 1), torch.stack([zero, height, down], 1)], 1)


def _warp(pixels: Tensor, maps: Tensor) -> Tensor:
    """Sample images at affine maps of their coordinates; the border is repeated beyond it."""
    grid = functional.affine_grid(maps, list(pixels.shape), align_corners=False)
    return functional.grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def _affine(pixels: Tensor, **changed: Tensor) -> Tensor:
    """Sample images at x' = xx x + xy y + x0 and y' = yx x + yy y + y0, of which `changed` is not the identity."""
    one, zero = torch.ones(len(pixels), device=pixels.device), torch.zeros(len(pixels), device=pixels.device)
    maps = {"xx": one, "xy": zero, "x0": zero, "yx": zero, "yy": one, "y0": zero} | changed
    return _warp(pixels, torch.stack(list(maps.values()), 1).view(-1, 2, 3))


def _rotate(pixels: Tensor, s: Tensor) -> Tensor:
    angle = s * math.radians(135)
    flat = pixels.shape[2] / pixels.shape[3]  # coordinates are shares of each side: a turn must not stretch
    cos, sin = angle.cos(), angle.sin()
    return _affine(pixels, xx=cos, xy=-sin * flat, yx=sin / flat, yy=cos)


def _blend(other: Tensor, pixels: Tensor, s: Tensor) -> Tensor:
    """Away from the other image by almost s, or towards it."""
    return (other + (pixels - other) * (1 + s * 0.99)[:, None, None, None]).clamp(0, 1)


def _sharpness(pixels: Tensor, s: Tensor) -> Tensor:
    smooth = functional.avg_pool2d(functional.pad(pixels, (1, 1, 1, 1), mode="replicate"), 3, 1)
    return _blend(smooth, pixels, s)


def _posterize(pixels: Tensor, s: Tensor) -> Tensor:
    levels = 2.0 ** (8 - (s.abs() * 6).round())[:, None, None, None]
    return (pixels * 255 / (256 / levels)).floor() * (256 / levels) / 255


def _autocontrast(pixels: Tensor, _: Tensor) -> Tensor:
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    return torch.where(high > low, (pixels - low) / (high - low).clamp_min(1e-6), pixels)


def _equalize(pixels: Tensor, _: Tensor) -> Tensor:
    """Every level of grey equally often: an image's values replaced by their ranks, equal ones alike."""
    levels = (pixels * 255).round().long().clamp(0, 255).flatten(2)
    counts = torch.zeros(*levels.shape[:2], 256, device=pixels.device)
    counts.scatter_add_(2, levels, torch.ones_like(levels, dtype=counts.dtype))
    ranks = counts.cumsum(2)
    first = counts.gather(2, (counts > 0).float().argmax(2, keepdim=True))
    spread = (ranks - first) / (levels.shape[2] - first).clamp_min(1)
    return spread.gather(2, levels).view_as(pixels)


def _grey(pixels: Tensor) -> Tensor:
    if pixels.shape[1] != 3:
        return pixels.mean(1, keepdim=True)
    return sum(share * pixels[:, channel : channel + 1] for channel, share in enumerate(_GREY))  # type: ignore[return-value]


OPERATIONS: dict[str, Operation] = {
    "identity": lambda pixels, _: pixels,
    "shear_x": lambda pixels, s: _affine(pixels, xy=s * 0.99),
    "shear_y": lambda pixels, s: _affine(pixels, yx=s * 0.99),
    "shift_x": lambda pixels, s: _affine(pixels, x0=s),
    "shift_y": lambda pixels, s: _affine(pixels, y0=s),
    "rotate": _rotate,
    "brightness": lambda pixels, s: _blend(torch.zeros_like(pixels), pixels, s),
    "contrast": lambda pixels, s: _blend(_grey(pixels).mean((2, 3), keepdim=True).expand_as(pixels), pixels, s),
    "saturation": lambda pixels, s: _blend(_grey(pixels).expand_as(pixels), pixels, s),
    "sharpness": _sharpness,
    "posterize": _posterize,
    "solarize": lambda pixels, s: torch.where(pixels >= (1 - s.abs())[:, None, None, None], 1 - pixels, pixels),
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}
"""TrivialAugment's set (Mueller and Hutter, 2021), each image's strength from -1 to 1."""


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
        alpha = self.cutmix if use_cutmix else self.mixup
        numpy = require("numpy", extra="train", purpose="mixing images")  # torch's Beta takes no generator
        seed = int(torch.randint(2**31, (), generator=draw))
        share = float(numpy.random.default_rng(seed).beta(alpha, alpha))
        if use_cutmix:
            images, share = _pasted(images, order, share, draw)
        else:
            images = torch.lerp(images[order], images, share)
        targets = functional.one_hot(labels, self.classes).float()
        return images, torch.lerp(targets[order], targets, share)


def _pasted(images: Tensor, order: Tensor, share: float, draw: torch.Generator) -> tuple[Tensor, float]:
    """A box of the other image over each, and the share of the own pixels that are left."""
    sides = torch.tensor(images.shape[2:])
    centres = (torch.rand(len(sides), generator=draw) * sides).long().tolist()
    box, taken = [slice(None), slice(None)], 1
    for side, centre in zip(sides.tolist(), centres, strict=True):
        length = round(side * (1 - share) ** (1 / len(sides)))
        first = max(0, centre - length // 2)
        box.append(slice(first, min(side, first + length)))
        taken *= box[-1].stop - first
    mixed = images.clone()
    mixed[tuple(box)] = images[order][tuple(box)]
    return mixed, 1 - taken / int(sides.prod())
