"""Build a layer of the same kind for other numbers of channels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
LAYERS = (*CONVS, *NORMS, nn.Linear, nn.GroupNorm, nn.PReLU)
_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name)


class PendingLayer(nn.Module):
    """Stands for a layer until the first input says how many channels arrive."""

    def __init__(self, layer: nn.Module, channels: Callable[[int], int]) -> None:
        super().__init__()
        self.layer, self.channels = layer, channels
        self.built: nn.Module | None = None

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        if self.built is None:
            x = inputs[0] if inputs else options["input"]
            with torch.device("meta"):
                self.built = resized(self.layer, x, self.channels).train(self.training)
            take_hooks(self.built, self.layer, {})
        return self.built(*inputs, **options)

    def __getattr__(self, name: str) -> Any:
        """What a forward reads of the layer, its stride for example. Its weights have no shape before it runs."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or name in ("layer", "built"):
                raise
        value = getattr(self.built or self.layer, name)
        if self.built is None and isinstance(value, Tensor):
            raise AttributeError(f"it reads the {name} of a {type(self.layer).__name__} that has not run")
        return value


def resized(layer: nn.Module, x: Tensor, channels: Callable[[int], int]) -> nn.Module:
    """A layer of the same kind for the channels that arrive in `x`; `channels` gives those that leave.

    >>> resized(nn.Conv2d(3, 8, 5, groups=1), torch.empty(1, 6, 9, 9), lambda leaving: leaving // 2)
    Conv2d(6, 4, kernel_size=(5, 5), stride=(1, 1))
    """
    if isinstance(layer, nn.Linear):
        return nn.Linear(x.shape[-1], channels(layer.out_features), bias=layer.bias is not None)
    if isinstance(layer, nn.PReLU):
        return nn.PReLU(x.shape[1] if layer.num_parameters > 1 else 1, layer.init)
    arriving = x.shape[1]
    if isinstance(layer, nn.GroupNorm):
        return nn.GroupNorm(_groups(layer.num_groups, arriving), arriving, eps=layer.eps, affine=layer.affine)
    if isinstance(layer, NORMS):
        return _resized_norm(layer, arriving)
    assert isinstance(layer, CONVS)
    depthwise = layer.groups == layer.in_channels > 1
    leaving = arriving * layer.out_channels // layer.in_channels if depthwise else channels(layer.out_channels)
    groups = arriving if depthwise else _groups(layer.groups, arriving, leaving)
    names = ("stride", "padding", "dilation", "padding_mode")
    names += ("output_padding",) if isinstance(layer, TRANSPOSED) else ()
    options: dict[str, Any] = {name: getattr(layer, name) for name in names}
    return type(layer)(arriving, leaving, layer.kernel_size, groups=groups, bias=layer.bias is not None, **options)  # type: ignore[arg-type]


def take_hooks(new: nn.Module, old: nn.Module, copied: dict[int, Any]) -> None:
    """Give a layer the hooks of another; `copied` has the copies of what hooks may hold, by id, as in deepcopy."""
    for name in _HOOKS:
        setattr(new, name, copy.deepcopy(getattr(old, name), copied))


def _resized_norm(layer: nn.Module, channels: int) -> nn.Module:
    """A copy of a batch or instance norm, of whatever class, for other channels."""
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
