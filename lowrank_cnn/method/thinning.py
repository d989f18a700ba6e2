"""Make a dense network thinner: the rival that every low-rank network has to beat.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 10))
    >>> thin(net, width=0.5, input_size=(3, 8, 8))[0].out_channels
    32

Every layer keeps its kernel, stride and place and loses output channels; the last layer keeps its outputs. How
many channels a layer receives is not computed from a graph: the network runs once on the meta device, and each
layer is built for what arrives. So concatenations, residual sums and hand-written forwards need no special rules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.method.counting import count
from lowrank_cnn.method.init import init_
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.system.errors import LowRankError, nearest

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LAYERS = (*_CONVS, *_NORMS, nn.Linear, nn.GroupNorm)
_STEPS = 14


class _Pending(nn.Module):
    """Stands for a layer until the first input says how many channels arrive."""

    def __init__(self, layer: nn.Module, channels: Callable[[int], int]) -> None:
        super().__init__()
        self.layer, self.channels = layer, channels
        self.built: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.built is None:
            with torch.device("meta"):
                self.built = _resized(self.layer, x, self.channels).train(self.training)
        return self.built(x)


def thin(
    model: nn.Module,
    *,
    width: float | None = None,
    macs: float | None = None,
    input_size: Sequence[int],
    multiple: int = 16,
    layers: Mapping[str, float] | None = None,
) -> nn.Module:
    """A thinner copy of a dense network, freshly initialised, to be trained from scratch.

    - `width`: the share of its output channels that each layer keeps.
    - `macs`: the share of multiply-accumulates to keep instead; the nearest width is found by bisection.
    - `input_size`: channels, height and width of one image.
    - `multiple`: channels are rounded to multiples of this, which kernels of every engine run fast. A layer with
      fewer channels than this keeps them.
    - `layers`: the widths of some layers, by name or by the name of a module around them, in place of `width`:
      {"head": 1.0} leaves a head as wide as it is.

    >>> import lowrank_cnn as lr
    >>> dense = lr.create_model("vgg11-gmp", width=0.5)
    >>> thin = lr.thin(dense, width=0.5, input_size=(3, 64, 64))
    >>> lr.count(thin, (3, 64, 64)).macs < lr.count(dense, (3, 64, 64)).macs
    True
    """
    if (width is None) == (macs is None):
        raise LowRankError("thin takes either a width or a share of the multiply-accumulates (macs).")
    share = width if width is not None else macs
    if not isinstance(share, int | float) or not 0 < share <= 4:
        raise LowRankError(f"a width or a share of the MACs lies above 0 and up to 4, not {share!r}.")
    if found := [name for name, layer in model.named_modules() if isinstance(layer, CompositeConv2d)]:
        raise LowRankError(f"thin takes dense networks, and {found[0]} is low-rank: thin first, then convert.")
    blank = copy.deepcopy(model).to("meta").eval()
    own = _own_widths(blank, layers or {})
    plan = _Thinning(blank, torch.empty((1, *input_size), device="meta"), multiple, own)
    if width is not None:
        return _fresh(plan.at(float(width)), model)
    return _fresh(plan.nearest(float(share) * count(model, input_size).macs), model)


def _own_widths(model: nn.Module, layers: Mapping[str, float]) -> dict[nn.Module, float]:
    """The widths that layers were given by name, or by that of a module around them."""
    names = [name for name, _ in model.named_modules()]
    for name, share in layers.items():
        if name not in names:
            raise LowRankError(f"the network has no layer {name!r}; {nearest(name, names)}")
        if not 0 < share <= 4:
            raise LowRankError(f"the width of {name} lies above 0 and up to 4, not {share!r}.")
    return {layer: share for name, share in layers.items() for layer in model.get_submodule(name).modules()}


class _Thinning:
    """Makes thinner copies of a network that lies on the meta device; some layers have `own` widths."""

    def __init__(self, blank: nn.Module, x: Tensor, multiple: int, own: Mapping[nn.Module, float]) -> None:
        self.blank, self.x, self.multiple, self.own = blank, x, multiple, own
        self.last = _last_layer(blank, x)

    def nearest(self, target: float) -> nn.Module:
        """Bisect the width. MACs are a staircase of it, so remember the closest step found."""
        low, high = 0.0, 4.0
        best: tuple[float, nn.Module] | None = None
        for _ in range(_STEPS):
            middle = (low + high) / 2
            found = self.at(middle)
            cost = count(found, tuple(self.x.shape[1:])).macs
            if best is None or abs(cost - target) < abs(best[0] - target):
                best = (cost, found)
            low, high = (middle, high) if cost < target else (low, middle)
        assert best is not None
        return best[1]

    def at(self, width: float) -> nn.Module:
        """The network at a width."""

        def channels(layer: nn.Module) -> Callable[[int], int]:
            share = self.own.get(layer, width)
            return (lambda n: n) if layer is self.last else (lambda n: _rounded(n, share, self.multiple))

        pending = {
            layer: _Pending(copy.deepcopy(layer), channels(layer))
            for layer in self.blank.modules()
            if type(layer) in _LAYERS or isinstance(layer, _NORMS)
        }
        new = copy.deepcopy(self.blank, {id(old): stand_in for old, stand_in in pending.items()}).eval()
        try:
            with torch.no_grad():
                new(self.x)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise LowRankError(
                f"the network cannot be made thinner, its forward expects fixed widths: {first}"
            ) from error
        built = {id(stand_in): stand_in.built or stand_in.layer for stand_in in pending.values()}
        return copy.deepcopy(new, built)


def _fresh(new: nn.Module, model: nn.Module) -> nn.Module:
    """Real memory with fresh weights, on the device and in the modes of the model."""
    first = next(model.parameters())
    new = new.to_empty(device=first.device)
    for module in new.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    for (name, buffer), (_, source) in zip(new.named_buffers(), model.named_buffers(), strict=False):
        if buffer.shape == source.shape and "running" not in name and "tracked" not in name:
            buffer.copy_(source)
    return init_(new).to(first.dtype).train(model.training)


def _last_layer(blank: nn.Module, x: Tensor) -> nn.Module | None:
    """The conv or linear layer that runs last: its outputs are the classes."""
    order: list[nn.Module] = []
    twin = copy.deepcopy(blank)
    places = dict(zip(twin.modules(), blank.modules(), strict=True))
    watched = [module for module in twin.modules() if type(module) in (*_CONVS, nn.Linear)]
    for module in watched:
        module.register_forward_hook(lambda module, _inputs, _output: order.append(places[module]))
    try:
        with torch.no_grad():
            twin(x)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise LowRankError(f"the network does not take an image of {tuple(x.shape[1:])}: {first}") from error
    return order[-1] if order else None


def _rounded(channels: int, width: float, multiple: int) -> int:
    if channels < multiple:
        return channels
    return max(multiple, round(channels * width / multiple) * multiple)


def _resized(layer: nn.Module, x: Tensor, channels: Callable[[int], int]) -> nn.Module:
    """A layer of the same kind for the channels that arrive in `x`."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(x.shape[-1], channels(layer.out_features), bias=layer.bias is not None)
    arriving = x.shape[1]
    if isinstance(layer, nn.GroupNorm):
        return nn.GroupNorm(_groups(layer.num_groups, arriving), arriving, eps=layer.eps, affine=layer.affine)
    if isinstance(layer, _NORMS):
        return _resized_norm(layer, arriving)
    assert isinstance(layer, _CONVS)
    depthwise = layer.groups == layer.in_channels > 1
    leaving = arriving * layer.out_channels // layer.in_channels if depthwise else channels(layer.out_channels)
    groups = arriving if depthwise else _groups(layer.groups, arriving, leaving)
    options: dict[str, Any] = {
        name: getattr(layer, name) for name in ("stride", "padding", "dilation", "padding_mode")
    }
    return type(layer)(arriving, leaving, layer.kernel_size, groups=groups, bias=layer.bias is not None, **options)  # type: ignore[arg-type]


def _resized_norm(layer: nn.Module, channels: int) -> nn.Module:
    """A copy of a batch norm, of whatever class, for other channels."""
    new = copy.deepcopy(layer)
    new.num_features = channels  # type: ignore[assignment]
    for name, parameter in new._parameters.items():
        if parameter is not None:
            new._parameters[name] = nn.Parameter(parameter.new_empty(channels))
    for name, buffer in new._buffers.items():
        if buffer is not None and buffer.dim():  # the number of batches has none
            new._buffers[name] = buffer.new_empty(channels)
    return new


def _groups(wanted: int, *channels: int) -> int:
    """The largest number of groups up to `wanted` that divides all of these channels."""
    return next(groups for groups in range(wanted, 0, -1) if all(n % groups == 0 for n in channels))
