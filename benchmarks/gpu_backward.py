"""The fused backward of a layer in parts, against torch's own backward of the dense twin and of the composite.

The parts: `undo` through pool and ReLU (with the bias gradient), `input` gradient, `weights` gradient; for the
latter two, every tile worth measuring. The rivals' times are whole backward passes: pool, ReLU, bias and both
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_clock import milliseconds
from lowrank_cnn.kernels.conv import backward, toeplitz
from lowrank_cnn.kernels.conv import backward as backward_plan
from lowrank_cnn.kernels.conv.forward import run_plan
from lowrank_cnn.kernels.conv.gradients import compute_gradients, input_gradient, weight_gradient
from lowrank_cnn.kernels.conv.plans import KernelPlan
from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.problem import Problem, describe, empty_codes, pixels_last
from lowrank_cnn.kernels.reference import composite_reference


def measure_backward(
    plan: KernelPlan, x: Tensor, weights: list[Tensor], bias: Tensor, options: dict[str, Any], kernel: int
) -> dict[str, Any]:
    """Our backward whole and in parts, its errors, and the rivals'."""
    problem = describe(x, weights, **options)
    codes = empty_codes(problem, x)
    y = run_plan(plan, problem, x, weights, bias, codes)
    seen = (codes if codes is not None else y.permute(0, 2, 3, 1)).contiguous()
    grad, need_input = torch.randn_like(y), x.shape[1] > 4
    row: dict[str, Any] = {
        "forward with codes": milliseconds(lambda: run_plan(plan, problem, x, weights, bias, codes)),
        "all": milliseconds(lambda: compute_gradients(problem, grad, x, weights, seen, need_input=need_input)),
    }
    ours = compute_gradients(problem, grad, x, weights, seen, need_input=need_input)
    row["error"] = _errors(ours, x, weights, bias, grad, options)
    if toeplitz.gradient_unsupported(problem) is None:
        last, pixels = pixels_last(grad), pixels_last(x)
        row["weights, toeplitz"] = milliseconds(
            lambda: toeplitz.launch_toeplitz_gradient(problem, pixels, last, seen)
        )
        with patch.object(toeplitz, "gradient_unsupported", return_value="compared with"):
            row["all, without toeplitz"] = milliseconds(
                lambda: compute_gradients(problem, grad, x, weights, seen, need_input=need_input)
            )
    if need_input:
        last, pixels = pixels_last(grad), pixels_last(x)
        g, _ = backward.launch_undo(problem, last, seen, 264)
        row["undo"] = milliseconds(lambda: backward.launch_undo(problem, last, seen, 264))
        row["input"] = milliseconds(lambda: input_gradient(problem, g, weights))
        row["input, plain"] = _best(
            backward_plan.INPUT_TILES, lambda tile: backward.launch_input_gradient(problem, g, weights, tile)
        )
        row["weights"] = milliseconds(lambda: weight_gradient(problem, g, pixels))
        row["weights, plain"] = _plain_weights(problem, g, pixels)
    dense = torch.randn((problem.filters, x.shape[1], kernel, kernel), device=x.device, dtype=x.dtype)
    side = (kernel // 2, kernel // 2)
    padded = {**options, "padding": [(side, side)]}
    row["naive composite"] = _tried(lambda: _by_torch(x, weights, bias, grad, options))
    row["dense"] = _tried(lambda: _by_torch(x, [dense], bias, grad, padded))
    return row


def _plain_weights(problem: Problem, g: Tensor, pixels: Tensor) -> dict[str, float]:
    """The plain kernel of the weight gradient: its time, and how much the chosen kernel's result differs."""
    tile = replace(backward_plan.weight_tile(problem), stages=1)

    def plain() -> list[Tensor]:
        return backward.launch_weight_gradient(problem, g, pixels, 264, tile)

    right = _flat(plain())
    off = float((_flat(weight_gradient(problem, g, pixels)) - right).norm() / right.norm())
    return milliseconds(plain) | {"off": off}


def _tried(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The measurement, or why it failed; the others continue."""
    try:
        return measured()
    except Exception as failure:
        return {"failed": repr(failure)[:200]}


def run_backward(x: Tensor, weights: list[Tensor], options: dict[str, Any]) -> None:
    """Run every part with every tile once, to fill the compiler's cache."""
    problem = describe(x, weights, **options)
    shape = (problem.batch, *problem.result_size, problem.filters)
    grad = torch.randn(shape, device=x.device, dtype=x.dtype)
    seen = grad if problem.pool is None else torch.zeros(shape, device=x.device, dtype=torch.uint8)
    need_input = x.shape[1] > 4
    compute_gradients(problem, grad.permute(0, 3, 1, 2), x, weights, seen, need_input=need_input)
    if not need_input:
        return
    g, _ = backward.launch_undo(problem, grad, seen, 264)
    for tile in backward_plan.INPUT_TILES:
        backward.launch_input_gradient(problem, g, weights, tile)
    weight_gradient(problem, g, pixels_last(x))
    _plain_weights(problem, g, pixels_last(x))


def _best(tiles: Sequence[Tile], launch: Callable[[Tile], Any]) -> dict[str, Any]:
    """The fastest tile's time, and every tile's; tiles that disagree with the default are left out."""
    times: dict[Tile, dict[str, float]] = {}
    failed = {}
    expected = _flat(launch(tiles[0]))
    for tile in tiles:
        try:
            error = float((_flat(launch(tile)) - expected).norm() / expected.norm())
            if error < 1e-2:
                times[tile] = milliseconds(lambda tile=tile: launch(tile))
            else:
                failed[str(tile)] = f"wrong by {error:.2g}"
        except Exception as failure:  # a tile that fails says so and the rest go on
            failed[str(tile)] = repr(failure)[:200]
    best = min(times, key=lambda tile: times[tile]["ms"])
    named = {"-".join(map(str, asdict(tile).values())): time["ms"] for tile, time in times.items()}
    return {**times[best], "tile": asdict(best), "tiles": named, "failed": failed}


def _flat(result: Tensor | Sequence[Tensor]) -> Tensor:
    parts = [result] if isinstance(result, Tensor) else list(result)
    return torch.cat([part.float().flatten() for part in parts])


def _by_torch(
    x: Tensor, weights: list[Tensor], bias: Tensor, grad: Tensor, options: dict[str, Any]
) -> dict[str, float]:
    """Torch's own backward of a layer, cuDNN's kernels inside, the forward not counted."""
    leaves = [t.detach().clone(memory_format=torch.preserve_format) for t in (*weights, bias.to(x.dtype))]
    leaves += [x.detach()] if x.shape[1] > 4 else []
    for leaf in leaves:
        leaf.requires_grad_()
    image = leaves[-1] if x.shape[1] > 4 else x
    y = composite_reference(image, leaves[: len(weights)], leaves[len(weights)], **options)
    return milliseconds(lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True))


def _errors(
    ours: tuple[Tensor | None, list[Tensor], Tensor | None],
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor,
    grad: Tensor,
    options: dict[str, Any],
) -> dict[str, float]:
    """Relative error against torch's own gradients in float32 (the whole batch in float64 would take long)."""
    leaves = [t.float().requires_grad_() for t in (x, *weights, bias)]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        y = composite_reference(leaves[0], leaves[1:-1], leaves[-1], **options)
        exact = torch.autograd.grad(y, leaves, grad.float())
    names = ["input", *(f"weights{i}" for i in range(len(weights))), "bias"]
    pairs = zip(names, [ours[0], *ours[1], ours[2]], exact, strict=True)
    return {name: float((a - b).norm() / b.norm()) for name, a, b in pairs if a is not None}


def show_backward(row: dict[str, Any]) -> None:
    times = {name: value["ms"] for name, value in row.items() if isinstance(value, dict) and "ms" in value}
    others = {name: value for name, value in row.items() if name not in times}
    print("    backward", {name: round(ms, 3) for name, ms in times.items()}, others)
    if "input, plain" in row:
        print("      input", {name: round(ms, 3) for name, ms in row["input, plain"]["tiles"].items()})
