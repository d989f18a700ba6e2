import pytest
import torch
from torch import nn

from lowrank_cnn.core.notes import notes
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.decompose import decompose


class OwnConv(nn.Conv2d):
    """One that computes something of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class Renamed(nn.Conv2d):
    """A subclass by name alone."""


class Padded(nn.Conv2d):
    """As in efficientnet_pytorch: a padding module of its own, then the conv."""

    def __init__(self, *sizes: int, pad: nn.Module, **options: object) -> None:
        super().__init__(*sizes, **options)  # type: ignore[arg-type]
        self.static_padding = pad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.static_padding(x)
        options = (self.stride, self.padding, self.dilation, self.groups)
        return nn.functional.conv2d(x, self.weight, self.bias, *options)


class Scaled(nn.Conv2d):
    """Computes by a method that the forward of torch's conv calls."""

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(input, 2 * weight, bias)


class Called(nn.Conv2d):
    """Computes in the call, which no trace of a forward shows."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(input)


def patched() -> nn.Conv2d:
    """A conv whose forward was replaced in place."""
    conv = nn.Conv2d(4, 8, 3)
    weight = conv.weight.detach()
    conv.forward = lambda x: nn.functional.conv2d(x, 2 * weight)  # type: ignore[method-assign]
    return conv


class Sized(nn.Conv2d):
    """Pads by the size of its input, which no trace can follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.pad(x, (1, 1, 1, 1)) if x.shape[-1] % 2 else x)


PADDED = [
    Padded(4, 8, 3, pad=nn.ZeroPad2d((0, 1, 0, 1)), stride=2),
    Padded(4, 8, 3, pad=nn.ZeroPad2d((2, 1, 0, 1)), padding=1, bias=False),
    Padded(4, 8, 5, pad=nn.Identity(), dilation=2),
    Renamed(4, 8, 3, padding="same"),
]


@pytest.mark.parametrize("conv", PADDED, ids=lambda conv: type(conv).__name__)
def test_a_subclass_that_provably_is_a_plain_conv_is_rewritten(conv: nn.Conv2d):
    conv = conv.double()
    new = decompose(nn.Sequential(conv), "separable(m=40)", allow_costlier=True)
    assert [row.name for row in notes(new).conversion.changed] == ["0"]
    for size in (15, 16):
        x = torch.randn(2, 4, size, size, dtype=torch.float64)
        torch.testing.assert_close(new(x), conv(x), rtol=1e-9, atol=1e-9)


OWN = [OwnConv(4, 8, 3), Sized(4, 8, 3), Padded(4, 8, 3, pad=nn.ReflectionPad2d(1)), Scaled(4, 8, 3)]


@pytest.mark.parametrize("conv", [*OWN, Called(4, 8, 3), patched()])
def test_a_subclass_that_computes_something_else_stays(conv: nn.Conv2d):
    new = convert(nn.Sequential(conv, nn.Conv2d(8, 8, 3)), "lr")
    (kept,) = notes(new).conversion.kept
    assert (kept.name, kept.reason) == (
        "0",
        f"its class {type(conv).__name__} computes something else than nn.Conv2d",
    )
