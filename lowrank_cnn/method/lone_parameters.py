"""Fit parameters that belong to no layer of a known kind, such as the scale of a residual branch.

A forward of the user's own multiplies maps by them, or adds them. Where the maps have other channels than the
parameter, the parameter gets theirs. So do layer norms, whose subclasses place channels where they like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_POINTWISE = ("mul", "add", "sub", "div", "mul_", "add_", "sub_", "div_")
_VIEWS = ("reshape", "view", "unsqueeze", "__getitem__")


class FittedParameters(TorchFunctionMode):
    """While a network runs on the meta device, resizes its parameters to the maps that they meet.

    `layers` are left alone: they are built for what arrives.
    """

    def __init__(self, network: nn.Module, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        known = {id(p) for layer in layers for p in layer.parameters()}
        self.homes: dict[Tensor, tuple[nn.Module, str]] = {
            parameter: (module, name)
            for module in network.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in known
        }
        self.views: dict[Tensor, Tensor] = {}
        self.norms: dict[nn.Module, tuple[int]] = {}

    def __exit__(self, *error: Any) -> None:
        """Put the new parameters in their places: a trial run leaves none of what it changed."""
        super().__exit__(*error)
        for parameter, (module, name) in self.homes.items():
            module._parameters[name] = parameter  # type: ignore[assignment]
        for norm, shape in self.norms.items():
            norm.normalized_shape = shape  # type: ignore[assignment]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options, name = kwargs or {}, getattr(func, "__name__", "")
        if func is functional.layer_norm:
            return self._normed(*args, **options)
        if name in _POINTWISE and len(args) == 2:
            args = [self._fitted(args[0], args[1]), self._fitted(args[1], args[0])]
        result = func(*args, **options)
        if name in _VIEWS and args[0] in self.homes and result.numel() == args[0].numel():
            self.views[result] = args[0]
        return result

    def _fitted(self, value: Any, maps: Any) -> Any:
        """A parameter, or a view of one, with the channels of the maps; any other value as it is."""
        if not isinstance(value, Tensor) or not isinstance(maps, Tensor):
            return value
        parameter = self.views.get(value, value)
        if parameter not in self.homes or maps.dim() < value.dim():
            return value
        beside = maps.shape[maps.dim() - value.dim() :]
        differ = [
            axis for axis, (n, m) in enumerate(zip(value.shape, beside, strict=True)) if n != m and 1 not in (n, m)
        ]
        if len(differ) != 1:
            return value
        (axis,) = differ
        own = [place for place, n in enumerate(parameter.shape) if n == value.shape[axis]]
        resized = self._resized(parameter, own[0], beside[axis])
        shape = [*value.shape[:axis], beside[axis], *value.shape[axis + 1 :]]
        return resized.reshape(shape)

    def _normed(
        self,
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        channels = x.shape[-1]
        if (
            len(normalized_shape) == 1
            and normalized_shape[0] != channels
            and weight is not None
            and weight in self.homes
        ):
            module, _ = self.homes[weight]
            self.norms[module] = normalized_shape = (channels,)
            weight = self._resized(weight, 0, channels)
            bias = self._resized(bias, 0, channels) if bias is not None and bias in self.homes else bias
        return functional.layer_norm(x, normalized_shape, weight, bias, eps)  # type: ignore[arg-type]

    def _resized(self, parameter: Tensor, axis: int, channels: int) -> Tensor:
        """Put a parameter of the new shape in the place of the old one."""
        module, name = self.homes.pop(parameter)
        shape = [*parameter.shape[:axis], channels, *parameter.shape[axis + 1 :]]
        new = nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)
        module._parameters[name] = new  # for the rest of this run
        self.homes[new] = (module, name)
        return new


def spread(tensor: Tensor, source: Tensor) -> bool:
    """Fill a tensor of another shape with the value that all of the source have; False if they differ."""
    if not source.numel() or not torch.equal(source, source.flatten()[:1].expand_as(source)):
        return False
    tensor.fill_(source.flatten()[0])
    return True
