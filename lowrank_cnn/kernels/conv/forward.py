"""Run the forward of a plan: pack the weights for its kernel, launch it, and gather statistics if asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor

from lowrank_cnn.kernels.conv import (
    fold,
    gather,
    hopper_plan,
    lengthen,
    overlap_plan,
    result_statistics,
    tiled,
    window_plan,
)
from lowrank_cnn.kernels.conv.pack import pack_rows, pack_union
from lowrank_cnn.kernels.conv.plans import KERNELS, KernelPlan
from lowrank_cnn.kernels.gpu import on_its_device
from lowrank_cnn.kernels.problem import ConvTensors, Problem
from lowrank_cnn.system.errors import LowRankError


@on_its_device
def run_plan(
    plan: KernelPlan,
    problem: Problem,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    codes: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Run a plan and return the result, channels-last; `codes`, if given, are filled for the backward.

    Weights are packed at every call. A packed copy cannot be kept here: a replayed CUDA graph may change a
    parameter without changing its version. `run_packed` takes a copy that its owner keeps.
    """
    packed = pack_weights(KERNELS[plan.kernel].layout, problem, weights, x.dtype)
    return run_packed(plan, problem, ConvTensors(x, packed, bias, codes, residual))


@on_its_device
def run_packed(plan: KernelPlan, problem: Problem, given: ConvTensors) -> Tensor:
    """As `run_plan`, with weights in the layout of the plan's kernel."""
    if given.residual is not None:
        _check_residual(problem, given.residual)
    if plan.kernel == "folded":
        inner = fold.folded(problem)
        assert inner is not None
        problem, given = inner, given._replace(x=fold.fold_pixels(given.x, problem.stride))
    problem = _with_zeros(plan.kernel, problem)
    return _launcher(plan.kernel)(problem, given, plan.tile)


def pack_weights(layout: str, problem: Problem, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weights in a layout of `plans.KERNELS`; it depends on groups and stride, not on the input's size."""
    if layout == "windows":
        return window_plan.pack_windows(weights, problem, dtype)
    if layout == "overlaps":
        return overlap_plan.pack_overlap(weights, problem, dtype)
    if layout == "union":
        return pack_union(weights, problem, gather.gathered_values(problem), dtype)
    if layout == "lengthened":
        return lengthen.pack_lengthened(weights, problem, dtype)
    if layout == "enclosed":
        return lengthen.pack_enclosed(weights, problem, dtype)
    return pack_rows(folded_weights(problem, weights) if layout == "blocks" else weights, dtype)


@on_its_device
def run_with_statistics(
    plan: KernelPlan, problem: Problem, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a plan; returns the result and its mean and biased variance per channel in float32."""
    packed = pack_weights(KERNELS[plan.kernel].layout, problem, weights, x.dtype)
    count = _part_count(plan, problem)
    if not count:
        y = run_packed(plan, problem, ConvTensors(x, packed, bias))
        return y, *result_statistics.launch_merge(result_statistics.launch_parts(y))
    parts = result_statistics.empty_parts(count, x, problem.filters)
    y = run_packed(plan, problem, ConvTensors(x, packed, bias, parts=parts))
    return y, *result_statistics.launch_merge(parts)


def _part_count(plan: KernelPlan, problem: Problem) -> int:
    """The number of parts of the statistics that a plan stores; 0 if it stores none."""
    if plan.kernel == "tiled":
        return tiled.part_count(problem, plan.tile)
    if KERNELS[plan.kernel].tile is not hopper_plan.HopperTile:
        return 0
    return hopper_plan.part_count(_with_zeros(plan.kernel, problem), plan.tile)


def packed_shape(layout: str, problem: Problem) -> tuple[int, int]:
    """The shape of what `pack_weights` returns."""
    if layout == "windows":
        return 2 * window_plan.ROWS_READ * problem.filters, window_plan.PLACES**2
    if layout == "overlaps":
        return len(overlap_plan.slabs_of(problem)) * problem.filters, 4 * overlap_plan.PLACES
    if layout == "union":
        return gather.gathered_values(problem), problem.filters
    inner = fold.folded(problem) if layout == "blocks" else _with_zeros(layout, problem)
    assert inner is not None
    return sum(group.taps * group.filters for group in inner.groups), inner.channels


def folded_weights(problem: Problem, weights: Sequence[Tensor]) -> list[Tensor]:
    """The groups' weights for the folded problem (see `fold`)."""
    inner = fold.folded(problem)
    assert inner is not None
    pairs = zip(weights, problem.groups, strict=True)
    return [fold.fold_weights(weight, group, problem.stride, inner.channels) for weight, group in pairs]


def _with_zeros(kernel: str, problem: Problem) -> Problem:
    """The problem that a kernel runs: if lengthened or enclosed, with zeros around the taps of the groups."""
    if kernel == "enclosed":
        return problem.as_dense
    form = lengthen.lengthened(problem) if kernel == "lengthened" else problem
    assert form is not None
    return form


def _check_residual(problem: Problem, residual: Tensor) -> None:
    size = (problem.batch, problem.filters, problem.out_height, problem.out_width)
    if tuple(residual.shape) != size:
        found, wanted = "x".join(map(str, residual.shape)), "x".join(map(str, size))
        raise LowRankError(f"the residual is {found}; it must be {wanted}, as what it is added to.")


def _launcher(kernel: str) -> Callable[..., Tensor]:
    """The launcher of a kernel, imported when it is used: those for Hopper need Gluon."""
    module, name = KERNELS[kernel].launcher.split(".")
    return getattr(import_module(f"lowrank_cnn.kernels.conv.{module}"), name)
