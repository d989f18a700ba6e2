"""The launch of a plan's kernel, and of the kernels of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from lowrank_cnn.kernels.conv import backward, backward_plan, fold, gather, hopper_plan, stem, tiled, window_plan
from lowrank_cnn.kernels.conv.known import known
from lowrank_cnn.kernels.conv.pack import pack_rows, pack_union
from lowrank_cnn.kernels.conv.plans import OLDER, Plan, plans
from lowrank_cnn.kernels.device_guard import on_its_device
from lowrank_cnn.kernels.problem import Problem, pixels_last

OLDER_WEIGHTS = (32, 64, 64, 4, 3)
"""As `plans.OLDER`, for the weights' gradient."""


@on_its_device
def forward(
    plan: Plan,
    problem: Problem,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    codes: Tensor | None = None,
) -> Tensor:
    """The result of a problem by a plan; `codes`, where given, are filled for the backward."""
    if plan.kernel == "folded":
        inner, pixels, taps = _folded(problem, x, weights)
        return forward(Plan("tiled", plan.tile), inner, pixels, taps, bias, codes)
    packed = _pack(plan.kernel, problem, weights, x.dtype)
    return _launcher(plan.kernel)(problem, x, packed, bias, plan.tile, codes)


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
    programs = programs_at_once(x.device)
    if has_windows(problem, capability_of(x.device)) and not need_input:
        from lowrank_cnn.kernels.conv.window_gradient import launch_window_gradient

        dw, db = launch_window_gradient(problem, pixels, g, seen)
        return None, dw, db
    if stem.unsupported(problem) is None and not need_input:
        dw, db = stem.launch_stem_gradient(problem, x, g, seen, programs)
        return None, dw, db
    if fold.folded(problem) is not None:
        return _unfolded_gradients(problem, grad, x, weights, seen, need_input=need_input, need_bias=need_bias)
    g, db = backward.launch_undo(problem, g, seen, programs, need_bias=need_bias)
    dx = input_gradient(problem, g, weights) if need_input else None
    return dx, weight_gradient(problem, g, pixels), db


def _folded(problem: Problem, x: Tensor, weights: Sequence[Tensor]) -> tuple[Problem, Tensor, list[Tensor]]:
    """A problem over blocks of pixels, with its tensors."""
    inner = fold.folded(problem)
    assert inner is not None
    pairs = zip(weights, problem.groups, strict=True)
    taps = [fold.fold_weights(weight, group, problem.stride, inner.channels) for weight, group in pairs]
    return inner, fold.fold_pixels(x, problem.stride), taps


def _unfolded_gradients(
    problem: Problem, grad: Tensor, x: Tensor, weights: Sequence[Tensor], seen: Tensor, **needs: bool
) -> tuple[Tensor | None, list[Tensor], Tensor | None]:
    inner, pixels, taps = _folded(problem, x, weights)
    dx, taps, db = gradients(inner, grad, pixels, taps, seen, **needs)
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
    if turned is not None and (plan := _hopper_plan(turned, capability_of(g.device))) is not None:
        flipped = weights[0].detach().flip(2, 3).transpose(0, 1)
        return forward(plan, turned, g.permute(0, 3, 1, 2), [flipped], None)
    return backward.launch_input_gradient(problem, g, weights, _input_tile(problem, g.device))


def weight_gradient(problem: Problem, g: Tensor, pixels: Tensor) -> list[Tensor]:
    """The groups' gradients in float32, from [N, H, W, filters] before pool and ReLU and [N, H, W, channels]."""
    programs, capability = programs_at_once(g.device), capability_of(g.device)
    if capability[0] == 9 and hopper_plan.unsupported(problem) is None:
        from lowrank_cnn.kernels.conv.hopper_weights import launch_weights_hopper

        return launch_weights_hopper(problem, g, pixels, programs)
    return backward.launch_weight_gradient(problem, g, pixels, programs, _weight_tile(problem, capability))


@lru_cache(maxsize=4096)
def _hopper_plan(problem: Problem, capability: tuple[int, int]) -> Plan | None:
    plan = plans(problem, capability=capability)[0] if hopper_plan.unsupported(problem) is None else None
    return plan if plan is not None and plan.kernel == "hopper" else None


def _input_tile(problem: Problem, device: torch.device) -> tiled.Tile | None:
    capability = capability_of(device)
    if (0, 0) < capability < (9, 0):
        return replace(tiled.Tile(*OLDER), filters=OLDER[1] * 2 // problem.dtype.itemsize)
    stored = known(problem, capability, "input")
    return tiled.Tile(**stored) if stored else None


def _weight_tile(problem: Problem, capability: tuple[int, int]) -> tiled.Tile:
    """Turned, the gradient goes to the matrix unit through registers.

    Triton 3.6, pipelining that for Hopper, loads the next step's into registers that products under way still
    read: a few pixels in a million come out wrong. One stage waits for every product.
    """
    if (0, 0) < capability < (9, 0):
        return tiled.Tile(*OLDER_WEIGHTS)
    tile = tiled.Tile(*OLDER_WEIGHTS) if problem.dtype.itemsize > 2 else backward_plan.weight_tile(problem)
    return replace(tile, stages=1)


def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _pack(kernel: str, problem: Problem, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weights as the kernel reads them, made anew each time.

    Nothing tells that a replayed graph has changed a parameter (its version stays), so a packed copy cannot be
    kept safely; `fuse.freeze` lays weights out so that packing them costs nothing.
    """
    if kernel == "window":
        return window_plan.pack_windows(weights, problem, dtype)
    if kernel in ("stem", "gather"):
        return pack_union(weights, problem, gather.gathered_values(problem), dtype)
    return pack_rows(weights, dtype)


def _launcher(kernel: str) -> Callable[..., Tensor]:
    if kernel == "hopper":
        from lowrank_cnn.kernels.conv.hopper import launch_hopper

        return launch_hopper
    if kernel == "window":
        from lowrank_cnn.kernels.conv.window import launch_window

        return launch_window
    return {"tiled": tiled.launch_tiled, "stem": stem.launch_stem, "gather": gather.launch_gather}[kernel]


def programs_at_once(device: torch.device) -> int:
    """Programs of the gradients' kernels that run together: two on a multiprocessor."""
    return 2 * _multiprocessors(device)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
