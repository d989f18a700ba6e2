"""The launch of a plan's kernel, and of the kernels of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from lowrank_cnn.kernels import gpu
from lowrank_cnn.kernels.conv import (
    backward,
    backward_plan,
    fold,
    gather,
    hopper_plan,
    hopper_weights_plan,
    overlap_plan,
    parity,
    result_statistics,
    stem,
    tiled,
    window_plan,
)
from lowrank_cnn.kernels.conv.pack import LAYOUTS, pack_rows, pack_union
from lowrank_cnn.kernels.conv.plans import OLDER, KernelPlan, plans
from lowrank_cnn.kernels.conv.presets import preset
from lowrank_cnn.kernels.gpu import on_its_device
from lowrank_cnn.kernels.problem import Problem, pixels_last
from lowrank_cnn.system.errors import LowRankError

OLDER_WEIGHTS = (32, 64, 64, 4, 3)
"""As `plans.OLDER`, for the weights' gradient."""


@on_its_device
def forward(
    plan: KernelPlan,
    problem: Problem,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    codes: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The result of a problem by a plan; `codes`, where given, are filled for the backward.

    Weights are packed anew each time. Nothing tells that a replayed graph has changed a parameter (its version
    stays), so a packed copy cannot be kept safely here: `forward_packed` takes one that its owner keeps.
    """
    packed = pack_weights(LAYOUTS[plan.kernel], problem, weights, x.dtype)
    return forward_packed(plan, problem, x, packed, bias, codes, residual)


@on_its_device
def forward_packed(
    plan: KernelPlan,
    problem: Problem,
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    codes: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As `forward`, with weights that lie as the plan's kernel reads them."""
    if residual is not None:
        _check_residual(problem, residual)
    if plan.kernel == "folded":
        inner = fold.folded(problem)
        assert inner is not None
        blocks = fold.fold_pixels(x, problem.stride)
        return tiled.launch_tiled(inner, blocks, packed, bias, plan.tile, codes, residual)
    return _launcher(plan.kernel)(problem, x, packed, bias, plan.tile, codes, residual)


def pack_weights(layout: str, problem: Problem, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weights in a layout of `pack.LAYOUTS`, which depends on groups and stride, not on the input's size."""
    if layout == "windows":
        return window_plan.pack_windows(weights, problem, dtype)
    if layout == "overlaps":
        return overlap_plan.pack_overlap(weights, problem, dtype)
    if layout == "union":
        return pack_union(weights, problem, gather.gathered_values(problem), dtype)
    return pack_rows(_folded_weights(problem, weights) if layout == "blocks" else weights, dtype)


@on_its_device
def forward_with_statistics(
    plan: KernelPlan, problem: Problem, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The result of a plan, and its mean and biased variance per channel in float32."""
    packed = pack_weights(LAYOUTS[plan.kernel], problem, weights, x.dtype)
    counts = {"hopper": hopper_plan.part_count, "tiled": tiled.part_count}
    count = counts[plan.kernel](problem, plan.tile) if plan.kernel in counts else 0
    if not count:
        y = forward_packed(plan, problem, x, packed, bias)
        return y, *result_statistics.launch_merge(result_statistics.launch_parts(y))
    parts = result_statistics.empty_parts(count, x, problem.filters)
    y = _launcher(plan.kernel)(problem, x, packed, bias, plan.tile, None, None, parts)
    return y, *result_statistics.launch_merge(parts)


@on_its_device
def gradients(
    problem: Problem,
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    seen: Tensor,
    *,
    need_input: bool,
    need_bias: bool = True,
) -> tuple[Tensor | None, list[Tensor], Tensor | None]:
    """Gradients of input, weights and bias, the latter two in float32; None where not needed."""
    g, pixels, seen = pixels_last(grad), pixels_last(x), seen.contiguous()
    programs = 2 * gpu.multiprocessors(x.device)
    if has_windows(problem, gpu.capability_of(x.device)) and not need_input:
        from lowrank_cnn.kernels.conv.window_gradient import launch_window_gradient

        dw, db = launch_window_gradient(problem, pixels, g, seen)
        return None, dw, db
    if stem.unsupported(problem) is None and not need_input:
        dw, db = stem.launch_stem_gradient(problem, x, g, seen, programs)
        return None, dw, db
    if problem.stride != (1, 1) and parity.unsupported(problem) is None:
        g, db = backward.launch_undo(problem, g, seen, programs, need_bias=need_bias)
        dx = parity.input_gradient(problem, g, weights, _write_parity) if need_input else None
        return dx, parity.weight_gradients(problem, g, pixels, weight_gradient), db
    if fold.folded(problem) is not None:
        return _unfolded_gradients(problem, grad, x, weights, seen, need_input=need_input, need_bias=need_bias)
    g, db = backward.launch_undo(problem, g, seen, programs, need_bias=need_bias)
    dx = input_gradient(problem, g, weights) if need_input else None
    return dx, weight_gradient(problem, g, pixels), db


def _check_residual(problem: Problem, residual: Tensor) -> None:
    size = (problem.batch, problem.filters, problem.out_height, problem.out_width)
    if tuple(residual.shape) != size:
        found, wanted = "x".join(map(str, residual.shape)), "x".join(map(str, size))
        raise LowRankError(f"the residual is {found}; it must be {wanted}, as what it is added to.")


def _folded_weights(problem: Problem, weights: Sequence[Tensor]) -> list[Tensor]:
    """The groups' weights over blocks of pixels."""
    inner = fold.folded(problem)
    assert inner is not None
    pairs = zip(weights, problem.groups, strict=True)
    return [fold.fold_weights(weight, group, problem.stride, inner.channels) for weight, group in pairs]


def _unfolded_gradients(
    problem: Problem, grad: Tensor, x: Tensor, weights: Sequence[Tensor], seen: Tensor, **needs: bool
) -> tuple[Tensor | None, list[Tensor], Tensor | None]:
    inner = fold.folded(problem)
    assert inner is not None
    taps, blocks = _folded_weights(problem, weights), fold.fold_pixels(x, problem.stride)
    dx, taps, db = gradients(inner, grad, blocks, taps, seen, **needs)
    pairs = zip(taps, problem.groups, strict=True)
    dw = [fold.unfold_weights(part, group, problem.stride, problem.channels) for part, group in pairs]
    return None if dx is None else fold.unfold_pixels(dx, problem), dw, db


def has_windows(problem: Problem, capability: tuple[int, int]) -> bool:
    """Whether the gradient over windows takes a problem: it needs a spare channel."""
    spare = capability[0] == 9 and problem.channels < window_plan.PLACES
    return spare and window_plan.unsupported(problem) is None


def input_gradient(problem: Problem, g: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the input from [N, H, W, filters] before pool and ReLU.

    That of a single group is a convolution like any other, and has the kernel of one; groups that run different
    ways share no fetches, and add up in a kernel of their own.
    """
    turned = backward_plan.turned(problem)
    if turned is not None and (plan := _hopper_plan(turned, gpu.capability_of(g.device))) is not None:
        flipped = weights[0].detach().flip(2, 3).transpose(0, 1)
        return forward(plan, turned, g.permute(0, 3, 1, 2), [flipped], None)
    return backward.launch_input_gradient(problem, g, weights, _input_tile(problem, g.device))


def _write_parity(conv: parity.ParityConv, g: Tensor, taps: list[Tensor], dx: Tensor) -> None:
    tile = _input_tile(conv.problem, g.device)
    backward.write_input_gradient(conv.problem, g, taps, dx, tile, conv.begins)


def weight_gradient(problem: Problem, g: Tensor, pixels: Tensor) -> list[Tensor]:
    """The groups' gradients in float32, from [N, H, W, filters] before pool and ReLU and [N, H, W, channels].

    Both may be views, of some filters and of every second pixel say.
    """
    programs, capability = 2 * gpu.multiprocessors(g.device), gpu.capability_of(g.device)
    if capability[0] == 9 and hopper_weights_plan.unsupported(problem) is None:
        from lowrank_cnn.kernels.conv.hopper_weights import launch_weights_hopper

        return launch_weights_hopper(problem, g, pixels, programs)
    return backward.launch_weight_gradient(problem, g, pixels, programs, _weight_tile(problem, capability))


@lru_cache(maxsize=4096)
def _hopper_plan(problem: Problem, capability: tuple[int, int]) -> KernelPlan | None:
    plan = plans(problem, capability=capability)[0] if hopper_plan.unsupported(problem) is None else None
    return plan if plan is not None and plan.kernel == "hopper" else None


def _input_tile(problem: Problem, device: torch.device) -> tiled.Tile | None:
    capability = gpu.capability_of(device)
    if (0, 0) < capability < (9, 0):
        return replace(tiled.Tile(*OLDER), filters=OLDER[1] * 2 // problem.dtype.itemsize)
    stored = preset(problem, capability, "input")
    return KernelPlan.parse(stored).tile if stored else None


def _weight_tile(problem: Problem, capability: tuple[int, int]) -> tiled.Tile:
    """Turned, the gradient goes to the matrix unit through registers.

    Triton 3.6, pipelining that for Hopper, loads the next step's into registers that products under way still
    read: a few pixels in a million come out wrong. One stage waits for every product.
    """
    if (0, 0) < capability < (9, 0):
        return tiled.Tile(*OLDER_WEIGHTS)
    tile = tiled.Tile(*OLDER_WEIGHTS) if problem.dtype.itemsize > 2 else backward_plan.weight_tile(problem)
    return replace(tile, stages=1)


def packed_shape(layout: str, problem: Problem) -> tuple[int, int]:
    """The size of what `pack_weights` gives."""
    if layout == "windows":
        return 2 * window_plan.ROWS_READ * problem.filters, window_plan.PLACES**2
    if layout == "overlaps":
        return len(overlap_plan.slabs_of(problem)) * problem.filters, 4 * overlap_plan.PLACES
    if layout == "union":
        return gather.gathered_values(problem), problem.filters
    inner = fold.folded(problem) if layout == "blocks" else problem
    assert inner is not None
    return sum(group.taps * group.filters for group in inner.groups), inner.channels


def _launcher(kernel: str) -> Callable[..., Tensor]:
    if kernel == "hopper":
        from lowrank_cnn.kernels.conv.hopper import launch_hopper

        return launch_hopper
    if kernel == "window":
        from lowrank_cnn.kernels.conv.window import launch_window

        return launch_window
    if kernel == "overlap":
        from lowrank_cnn.kernels.conv.overlap import launch_overlap

        return launch_overlap
    return {"tiled": tiled.launch_tiled, "stem": stem.launch_stem, "gather": gather.launch_gather}[kernel]
