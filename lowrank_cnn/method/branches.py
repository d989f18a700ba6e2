"""Training-only branches beside a composite, folded into it exactly after training (RepVGG style).

A strip sees its pixels along one axis alone. In training its output is added to that of a 1x1 conv and, if the
shapes are equal, to the input itself, each after a batch norm of its own, as RepVGG does for squares (Ding et al.
2021). The 1x1 conv has the channel groups of the strip. In evaluation all of them are one linear map, whose
weights lie within the strip: the branches cost nothing to run. `merge` replaces them by that one layer.

`DenseHelpers` are branches that fade: dense convs whose share of the result falls to zero in training.

State dict of `BranchedConv2d` (stable): `strips`, `point`, and their norms `strips_norm`, `point_norm` and
`identity_norm`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.layers import CompositeConv2d, conv_of, dense_weight, mask_weights, set_weights, weights_of
from lowrank_cnn.method.spec import Composite


class BranchedConv2d(nn.Module):
    """A composite beside a 1x1 conv and the identity, each behind its own batch norm.

    In training the branches run, each with its own batch statistics. In evaluation the folded composite runs.
    Tools that read `weight`, `bias` or `kernel_size` get those of the folded composite.
    """

    _OF_STRIPS: ClassVar[tuple[str, ...]] = (
        "composite", "in_channels", "out_channels", "groups", "kernel_size", "stride", "dilation", "padding",
        "padding_mode",
    )  # fmt: skip
    __jit_unused_properties__: ClassVar[list[str]] = ["weight", "bias"]

    def __init__(self, strips: CompositeConv2d) -> None:
        super().__init__()
        if reason := unbranchable(strips):
            raise LowRankError(f"branches cannot be folded into this layer: {reason}.")
        channels, filters = strips.in_channels, strips.out_channels
        strips.bias = None  # the norms have biases
        self.strips = strips
        self.strips_norm = nn.BatchNorm2d(filters)
        groups = strips.channel_groups
        self.point = nn.Conv2d(channels, filters, 1, stride=strips.stride, groups=groups, bias=False)  # type: ignore[arg-type]
        self.point_norm = nn.BatchNorm2d(filters)
        same = channels == filters and strips.stride == (1, 1)
        self.identity_norm = nn.BatchNorm2d(filters) if same else None

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return self._by_branch(input)
        else:  # noqa: RET505  TorchScript leaves out what it cannot compile in an `else` alone
            return self._dispatched(input)

    @torch.jit.unused
    def _dispatched(self, x: Tensor) -> Tensor:
        """Run the branches in training, and for a symbolic trace, whose tools know torch's operations."""
        if self.training or isinstance(x, fx.Proxy):
            return self._by_branch(x)
        return self.strips.with_weights(x, *self.folded_weights())

    def _by_branch(self, x: Tensor) -> Tensor:
        y = self.strips_norm(self.strips(x)) + self.point_norm(self.point(x))
        return y if self.identity_norm is None else y + self.identity_norm(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.strips, name) if name in self._OF_STRIPS else super().__getattr__(name)

    @property
    def weight(self) -> Tensor:
        """The weight of the equivalent dense conv, with gradients."""
        return dense_weight(self.folded_weights()[0], self.strips.composite, self.strips.channel_groups)

    @property
    def bias(self) -> Tensor:
        return self.folded_weights()[1]

    def folded_weights(self) -> tuple[list[Tensor], Tensor]:
        """The weights and bias of the single composite that equals all branches in evaluation."""
        strips = self.strips
        for pruned in (strips.weights, self.point):
            mask_weights(pruned)
        scale, bias = _affine(self.strips_norm)
        point_scale, point_bias = _affine(self.point_norm)
        centre = self.point.weight[:, :, 0, 0] * point_scale[:, None]
        bias = bias + point_bias
        if self.identity_norm is not None:
            identity_scale, identity_bias = _affine(self.identity_norm)
            own = torch.eye(centre.shape[1], dtype=scale.dtype, device=scale.device)
            own = own.repeat(strips.channel_groups, 1)  # each channel is one of its channel group
            centre, bias = centre + own * identity_scale[:, None], bias + identity_bias
        folded = []
        parts = zip(strips.weights, strips.by_group(scale), strips.by_group(centre), strict=True)
        for weight, factor, middle in parts:
            taps = torch.zeros_like(weight, dtype=middle.dtype)
            taps[:, :, weight.shape[2] // 2, weight.shape[3] // 2] = middle
            folded.append((weight * factor.view(-1, 1, 1, 1) + taps).to(weight))
        return folded, bias.to(strips.weights[0])

    @torch.no_grad()
    def folded(self) -> nn.Module:
        """The composite, or the conv of one shape, that runs in place of the branches, with a bias."""
        strips = self.strips
        layer = conv_of(strips.in_channels, strips.composite, **strips.options | {"bias": True})
        layer = layer.to(strips.weights[0])
        set_weights(layer, *self.folded_weights())
        return layer.train(self.training)


class DenseHelpers:
    """A dense conv beside each composite that is trained, whose result is added times a factor.

    The convs begin with zeros, so that the network begins as it is; `remove` leaves it as it was, but for what it
    has learnt. A composite with branches has none.
    """

    NAME = "dense_helper"
    """The name of the conv within its composite."""

    def __init__(self, network: nn.Module) -> None:
        self.factor = torch.ones((), device=next(network.parameters()).device)
        branched = {id(m.strips) for m in network.modules() if isinstance(m, BranchedConv2d)}
        composites = [m for m in network.modules() if isinstance(m, CompositeConv2d) and id(m) not in branched]
        self._hooks = {}
        for layer in composites:
            if any(weight.requires_grad for weight in layer.weights):
                helper = layer.dense_view()
                helper.register_parameter("bias", None)
                nn.init.zeros_(weights_of(helper)[0])
                layer.add_module(self.NAME, helper)
                self._hooks[layer] = layer.register_forward_hook(self._add)

    def _add(self, layer: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> Tensor:
        return result + self.factor * layer.get_submodule(self.NAME)(*given)

    def remove(self) -> bool:
        """Take the convs out of the network; false if they were before."""
        had = bool(self._hooks)
        for layer, hook in self._hooks.items():
            hook.remove()
            delattr(layer, self.NAME)
        self._hooks = {}
        return had


@contextmanager
def helped(network: nn.Module, share: float) -> Iterator[DenseHelpers | None]:
    """Within the block, composites have dense helpers, if there is a share of the training that these take."""
    helpers = DenseHelpers(network) if share else None
    try:
        yield helpers
    finally:
        if helpers:
            helpers.remove()


def _affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """A batch norm in evaluation as scale and shift; in float32 at least, as torch computes norms."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    wide = torch.promote_types(norm.weight.dtype, torch.float32)
    scale = norm.weight.to(wide) * torch.rsqrt(norm.running_var.to(wide) + norm.eps)
    return scale, norm.bias.to(wide) - norm.running_mean.to(wide) * scale


def unbranchable(layer: CompositeConv2d) -> str:
    """The reason why branches cannot be folded into a composite; empty if they can."""
    if layer.shuffle:
        return "it shuffles its channel groups"
    steps = zip(layer.composite.kernel, layer.dilation, strict=True)
    centred = tuple((step * (size // 2),) * 2 for size, step in steps)
    if any(g.height % 2 == 0 or g.width % 2 == 0 for g in layer.composite.groups) or layer.padding != centred:
        return "its filters have no centre on the pixel that they are for"
    return ""


def branched_conv(in_channels: int, composite: Composite, **options: Any) -> nn.Module:
    """A layer with branches; without them where they could not be folded exactly."""
    strips = CompositeConv2d(in_channels, composite, **options)
    return conv_of(in_channels, composite, **options) if unbranchable(strips) else BranchedConv2d(strips)


def fold_branches(model: nn.Module) -> nn.Module:
    """A copy in which every branched layer is folded into one composite; the model itself if it has none."""
    branched = [m for m in model.modules() if isinstance(m, BranchedConv2d)]
    if not branched:
        return model
    return copy.deepcopy(model, {id(layer): layer.folded() for layer in branched})
