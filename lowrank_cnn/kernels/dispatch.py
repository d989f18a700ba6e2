"""One composite layer with what follows it: fused where that is supported and faster, else by torch.

`choice` decides, `mode` says how. What torch.export takes down is torch's own convolutions, which run anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.kernels import mode
from lowrank_cnn.kernels.autotune import choice
from lowrank_cnn.kernels.problem import Pair, Sides, describe
from lowrank_cnn.kernels.reference import composite_by_torch


def composite_conv2d(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    *,
    stride: Pair = (1, 1),
    padding: Sequence[Sides],
    relu: bool = False,
    pool: str | None = None,
) -> Tensor:
    """One composite layer with what follows it: fused where that is supported and faster, else by torch.

    `padding` has ((top, bottom), (left, right)) for each group; `pool` is "floor" or "ceil" for a 2x2 max-pool
    that rounds so, or None.
    """
    options: dict[str, Any] = {"stride": stride, "padding": padding, "relu": relu, "pool": pool}
    exporting, asked_for, fuses = _deciders()
    if exporting() or not (x.is_cuda or asked_for()):
        return composite_by_torch(x, weights, bias, **options)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
    # index() makes numbers of sizes that torch.compile holds open: the choice is made for one size.
    shapes = tuple(tuple(map(index, tensor.shape)) for tensor in (x, *weights))
    how = (stride, tuple(padding), relu, pool)
    added = None if bias is None else bias.dtype
    if not fuses(shapes, x.dtype, x.device, how, training, x.requires_grad, added):
        return composite_by_torch(x, weights, bias, **options)
    from lowrank_cnn.kernels.ops import composite_conv2d as fused
    from lowrank_cnn.kernels.ops import flat_padding

    codes = training and pool is not None
    return fused(x, list(weights), bias, list(stride), flat_padding(padding), relu, pool or "", codes)[0]


def explain_call(x: Tensor, weights: Sequence[Tensor], *, training: bool = False, **options: Any) -> str:
    """Which path `composite_conv2d` takes for such tensors, with the options of `describe`, and why."""
    if not (x.is_cuda or mode.asked_for()):
        return "torch (not on a GPU)"
    return choice.explain(describe(x, weights, **options), x.device, training=training)


def tune(model: torch.nn.Module, example: Tensor, *, training: bool = False) -> None:
    """Measure every plan of every layer a model calls on an example; later runs take the fastest."""
    from lowrank_cnn.kernels.autotune.ahead import prepare

    with mode.tuning(), torch.set_grad_enabled(training):
        prepare(lambda: model(example))
        model(example)


def _deciders() -> tuple[Any, Any, Any]:
    """Who is asked: the functions themselves, or what stands for them while torch.compile traces."""
    if torch.compiler.is_compiling():
        from lowrank_cnn.kernels import tracing

        return tracing.exporting, tracing.asked_for, tracing.fuses
    return torch.compiler.is_exporting, mode.asked_for, choice.fuses
