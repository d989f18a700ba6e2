"""The base class of all networks, their options, and the small modules between convs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, fx, nn

from lowrank_cnn.core.errors import LowRankError, check_number
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.method.schemes import Scheme, build_conv, parse_scheme

if TYPE_CHECKING:
    from pathlib import Path

WIDEST = 64
LARGEST = {"num_classes": 10**7, "in_channels": 10**5, "stride": 10**3, "image_size": 10**5}
"""The largest sizes that are built: larger ones are mistakes that would exhaust memory."""


@dataclass(frozen=True)
class Variant:
    """A row of a family's table: the scheme of its spatial convs, and the stride of the first."""

    scheme: str = "dense"
    stride: int = 1


@dataclass(frozen=True)
class Options:
    """The arguments of `create_model`, resolved."""

    num_classes: int
    in_channels: int = 3
    width: float = 1.0
    norm: str | None = None
    stride: int = 1
    scheme: str | None = None
    dropout: float | None = None
    image_size: int | None = None
    pool: str | None = None

    def __post_init__(self) -> None:
        for label, most in LARGEST.items():
            if label != "image_size" or self.image_size is not None:
                check_number(label, getattr(self, label), least=1, most=most, whole=True)
        check_number("width", self.width, above=0, most=WIDEST)
        if self.dropout is not None:
            check_number("dropout", self.dropout, least=0, below=1)
        if self.norm not in (None, "batch"):
            raise LowRankError(f"norm is None or 'batch', not {self.norm!r}.")
        if self.pool not in (None, "average"):
            raise LowRankError(f"pool is None (the paper's maximum) or 'average', not {self.pool!r}.")

    def filters(self, count: int) -> int:
        """A number of filters, scaled by the width; never fewer than two, so that a pair of groups fits."""
        return max(2, round(count * self.width))

    def sixteens(self, count: int) -> int:
        """A number of filters, scaled by the width to a multiple of sixteen, which every engine runs fast."""
        return max(1, round(count * self.width / 16)) * 16

    def scheme_or(self, default: str) -> Scheme:
        """The scheme asked for, or the variant's own."""
        return parse_scheme(self.scheme or default)

    def size_or(self, default: int) -> tuple[int, int, int]:
        """The image size that the network is built for: the requested one, or the paper's."""
        side = self.image_size or default
        return self.in_channels, side, side

    def drop(self, default: float) -> nn.Dropout:
        return nn.Dropout(default if self.dropout is None else self.dropout)


class Network(nn.Module):
    """A network that knows how it was made: `create_model(**network.config)` builds it again.

    >>> import lowrank_cnn as lr
    >>> net = lr.create_model("nin", num_classes=5)
    >>> net.config["num_classes"], net.input_size
    (5, (3, 30, 30))
    """

    __jit_unused_properties__: ClassVar[list[str]] = ["input_size"]
    if TYPE_CHECKING:
        save_pretrained: Callable[..., Path]  # set with `push_to_hub` by the package
        push_to_hub: Callable[..., str]

    def __init__(
        self,
        input_size: tuple[int, int, int],
        *,
        auxiliary: tuple[str, ...] = (),
        unpublished: tuple[str, ...] = (),
    ) -> None:
        """`auxiliary` names the parts that run in training alone, `unpublished` those that the paper omits."""
        super().__init__()
        note(self, input_size=input_size, auxiliary=auxiliary, unpublished=unpublished)
        # Annotated here: TorchScript does not understand annotations of a class that are strings.
        self.config: dict[str, object] = {}
        self.smallest = 1
        """The smallest height and width of an image that reaches the last layer with at least one pixel."""

    @property
    def input_size(self) -> tuple[int, ...]:
        """Channels, height and width of the images that the network is for."""
        size = notes(self).input_size
        assert size is not None
        return size

    def adjust_init(self) -> None:
        """Adjust the weights for this network; called once, right after initialisation."""

    def check_input(self, x: Tensor) -> None:
        """Raise `LowRankError` for images that the network cannot take; a scripted network checks nothing."""
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_images(x, str(self.config["name"]), self.input_size[0], self.smallest)


@fx.wrap  # a trace records one call, so that this check does not fix the size of the images
def check_images(x: Tensor, name: str, channels: int, smallest: int) -> None:
    """Refuse images of other channels than the network takes, or of fewer pixels."""
    if x.dim() != 4 or x.shape[1] != channels:
        raise LowRankError(f"{name} takes images as [N, {channels}, H, W], not {list(x.shape)}.")
    if min(x.shape[2:]) < smallest:
        size = f"{x.shape[2]}x{x.shape[3]}"
        raise LowRankError(f"{name} takes images of {smallest}x{smallest} at least, not {size}.")


class GlobalMaxPool(nn.Module):
    """The largest value of each channel, as a vector: the paper's head, whatever the image's size.

    On a GPU torch's adaptive pool copies the maps and then has one thread search each: a reduction does not.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.amax(dim=(2, 3))


class GlobalAveragePool(nn.Module):
    """The mean of each channel, as a vector."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


class FlattenSized(nn.Module):
    """Flatten maps of one known size, and refuse any other with a message about the network's images."""

    def __init__(self, size: int, image: int) -> None:
        super().__init__()
        self.size, self.image = size, image

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_maps(x, self.size, self.image)
        return x.flatten(1)


@fx.wrap
def check_maps(x: Tensor, size: int, image: int) -> None:
    """Refuse maps of another size than fully connected layers need."""
    if x.shape[2:] != (size, size):
        raise LowRankError(
            f"this network takes {image}x{image} images: its fully connected layers need maps of {size}x{size}, "
            f"not {x.shape[2]}x{x.shape[3]}; the -gmp variants take any size."
        )


def conv_block(
    name: str,
    in_channels: int,
    filters: int,
    kernel: int,
    options: Options,
    *,
    scheme: Scheme | None = None,
    stride: int = 1,
    relu: bool = True,
) -> OrderedDict[str, nn.Module]:
    """A conv under a scheme, its batch norm where asked for, and the ReLU that follows the last of its layers."""
    scheme = scheme or parse_scheme("dense")
    normed = options.norm == "batch" and relu
    conv = build_conv(in_channels, filters, kernel, scheme, stride=stride, padding=kernel // 2, bias=not normed)
    block: OrderedDict[str, nn.Module] = OrderedDict({name: conv})
    if normed:
        block[f"{name}_norm"] = nn.BatchNorm2d(scheme.out_filters(filters))
    if relu:
        block[f"{name}_relu"] = nn.ReLU(inplace=True)
    return block
