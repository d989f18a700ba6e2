"""The gradients of a composite conv: choose the kernels that compute them, and launch these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.conv import backward, equivalent, hopper_plan, stem, tiled, toeplitz
from lowrank_cnn.kernels.conv.forward import run_plan
from lowrank_cnn.kernels.conv.plans import KernelPlan, plans, preset
from lowrank_cnn.kernels.device import on_its_device
from lowrank_cnn.kernels.problem import Problem, empty_maps, pixels_last, pixels_view
from lowrank_cnn.kernels.reference import enclosed

OLDER_WEIGHTS = tiled.Tile(32, 64, 64, 4, 3)
"""As `tiled.OLDER`, for the weight gradient."""
FEW, FEW_TILE = 16, toeplitz.ToeplitzTile()
"""The most channels and filters of layers whose gradients read windows, and the tile for the input's."""


@on_its_device
def compute_gradients(
    problem: Problem,
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    seen: Tensor,
    *,
    need_input: bool,
    need_bias: bool = True,
) -> tuple[Tensor | None, list[Tensor], Tensor | None]:
    """Gradients of input, weights and bias, the latter two in float32; None for those not needed.

    `seen` is kept from the forward: the codes of a fused pool, else the result of a ReLU.
    """
    as_it_is = problem.pool is None and not problem.relu and not need_bias
    g, pixels, seen = (pixels_view if as_it_is else pixels_last)(grad), pixels_last(x), seen.contiguous()
    programs = 2 * gpu.multiprocessors(x.device)
    if has_windows(problem, gpu.capability_of(x.device)) and not need_input:
        from lowrank_cnn.kernels.conv.window import launch_window_gradient

        dw, db = launch_window_gradient(problem, pixels, g.contiguous(), seen)
        return None, dw, db
    if toeplitz.gradient_unsupported(problem) is None and not need_input:
        dw, db = toeplitz.launch_toeplitz_gradient(problem, pixels, g.contiguous(), seen)
        return None, dw, db
    if stem.STEM.unsupported(problem) is None and not need_input:
        dw, db = stem.launch_stem_gradient(problem, x, g.contiguous(), seen, programs)
        return None, dw, db
    if problem.stride != (1, 1) and equivalent.parity_unsupported(problem) is None:
        g, db = backward.launch_undo(problem, g, seen, programs, need_bias=need_bias)
        dx = _strided_input_gradient(problem, g, weights) if need_input else None
        return dx, _strided_weight_gradients(problem, g, pixels), db
    if equivalent.folded(problem) is not None:
        return _unfolded_gradients(problem, grad, x, weights, seen, need_input=need_input, need_bias=need_bias)
    g, db = backward.launch_undo(problem, g, seen, programs, need_bias=need_bias)
    dx = input_gradient(problem, g, weights) if need_input else None
    linear = replace(problem, activation=None, pool=None, residual=False)
    if _few(linear) and toeplitz.gradient_unsupported(linear) is None:
        return dx, toeplitz.launch_toeplitz_gradient(linear, pixels, g.contiguous(), g)[0], db
    return dx, weight_gradient(problem, g, pixels), db


def _few(problem: Problem) -> bool:
    """Whether windows are read faster, and fit into the shared memory of any GPU: in 16 bits."""
    return max(problem.channels, problem.filters) <= FEW and problem.dtype.itemsize == 2


def _unfolded_gradients(
    problem: Problem, grad: Tensor, x: Tensor, weights: Sequence[Tensor], seen: Tensor, **needs: bool
) -> tuple[Tensor | None, list[Tensor], Tensor | None]:
    inner = equivalent.folded(problem)
    assert inner is not None
    taps, blocks = equivalent.folded_weights(weights, problem), equivalent.fold_pixels(x, problem.stride)
    dx, taps, db = compute_gradients(inner, grad, blocks, taps, seen, **needs)
    pairs = zip(taps, problem.groups, strict=True)
    dw = [equivalent.unfold_weights(part, group, problem.stride, problem.channels) for part, group in pairs]
    return None if dx is None else equivalent.unfold_pixels(dx, problem), dw, db


def _strided_input_gradient(problem: Problem, g: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the input, [N, C, H, W]: each parity's into its view of the same memory."""
    convs, (down, across) = equivalent.parity_convs(problem), problem.stride
    maps = empty_maps((problem.batch, problem.channels, problem.height, problem.width), g)
    if len(convs) < down * across:
        maps.zero_()  # no tap reads the pixels of some parity
    for conv in convs:
        taps = [weights[i][:, :, t::down, u::across] for i, (t, u) in zip(conv.members, conv.taps, strict=True)]
        view = equivalent.pixels_of(maps.permute(0, 2, 3, 1), conv, problem.stride)
        tile = _input_tile(conv.problem, g.device)
        backward.write_input_gradient(conv.problem, g, taps, view, tile, conv.begins)
    return maps


def _strided_weight_gradients(problem: Problem, g: Tensor, pixels: Tensor) -> list[Tensor]:
    """The groups' gradients in float32, from those of a conv of stride 1 per parity."""
    found = [torch.empty(shape, device=g.device) for shape in problem.shapes]  # every tap reads one parity
    for conv in equivalent.parity_convs(problem):
        view = equivalent.pixels_of(pixels, conv, problem.stride)
        for first, last in equivalent.neighbours(conv):
            part = replace(conv.problem, groups=conv.problem.groups[first:last])
            begin = conv.begins[first]
            parts = weight_gradient(part, g[..., begin : begin + part.filters], view)
            places = zip(conv.members[first:last], conv.taps[first:last], parts, strict=True)
            for index, (t, u), value in places:
                found[index][:, :, t :: problem.stride[0], u :: problem.stride[1]] = value
    return found


def has_windows(problem: Problem, capability: tuple[int, int]) -> bool:
    """Whether `window_gradient` supports a problem: it needs Hopper and a spare channel."""
    spare = capability[0] == 9 and problem.channels < hopper_plan.PLACES
    return spare and hopper_plan.window_unsupported(problem) is None


def input_gradient(problem: Problem, g: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the input, from the gradient before pool and ReLU, [N, H, W, filters].

    For a single group this is a convolution, and the Hopper kernel runs it. Groups of different directions share
    no fetches: `backward` sums them in one kernel. Of few channels, they are one dense conv.
    """
    turned, weight, plan = backward.turned(problem.as_dense), weights[0], None
    if turned is not None and _few(turned) and toeplitz.TOEPLITZ.unsupported(turned) is None:
        weight, plan = enclosed(weights, problem.padding)[0], KernelPlan("toeplitz", FEW_TILE)
    elif (turned := backward.turned(problem)) is not None:
        plan = _hopper_plan(turned, gpu.capability_of(g.device))
    if turned is None or plan is None:
        return backward.launch_input_gradient(problem, g, weights, _input_tile(problem, g.device))
    taps = weight.detach().flip(2, 3).transpose(0, 1)
    return run_plan(plan, turned, g.permute(0, 3, 1, 2), [taps], None)


def weight_gradient(problem: Problem, g: Tensor, pixels: Tensor) -> list[Tensor]:
    """The groups' gradients in float32, from the gradient [N, H, W, filters] and the input [N, H, W, channels].

    Both may be views: of some filters, or of every second pixel.
    """
    programs, capability = 2 * gpu.multiprocessors(g.device), gpu.capability_of(g.device)
    longer = equivalent.lengthened(problem, hopper_plan.RUNS) or problem
    if capability[0] == 9 and hopper_plan.weights_unsupported(longer) is None:
        from lowrank_cnn.kernels.conv.hopper_weights import launch_weights_hopper

        return equivalent.own_taps(launch_weights_hopper(longer, g, pixels, programs), problem, longer.groups)
    return backward.launch_weight_gradient(problem, g, pixels, programs, _weight_tile(problem, capability))


@lru_cache(maxsize=4096)
def _hopper_plan(problem: Problem, capability: tuple[int, int]) -> KernelPlan | None:
    plan = plans(problem, capability=capability)[0] if hopper_plan.unsupported(problem) is None else None
    return plan if plan is not None and plan.kernel == "hopper" else None


def _input_tile(problem: Problem, device: torch.device) -> tiled.Tile | None:
    capability = gpu.capability_of(device)
    if (0, 0) < capability < (9, 0):
        return replace(tiled.OLDER, filters=tiled.OLDER.filters * 2 // problem.dtype.itemsize)
    stored = preset(problem, capability, "input")
    return KernelPlan.parse(stored).tile if stored else None


def _weight_tile(problem: Problem, capability: tuple[int, int]) -> tiled.Tile:
    """The tile for the weight gradient; on Hopper with one stage.

    The transposed gradient reaches the tensor cores through registers. If Triton 3.6 pipelines that for Hopper, it
    overwrites registers that running products still read, and a few values in a million are wrong. With one stage
    the kernel waits for every product.
    """
    if (0, 0) < capability < (9, 0):
        return OLDER_WEIGHTS
    tile = OLDER_WEIGHTS if problem.dtype.itemsize > 2 else backward.weight_tile(problem)
    return replace(tile, stages=1)
