"""What tests of kernels have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.kernels.problem import describe
from lowrank_cnn.kernels.reference import composite_reference

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
PADDING = [((1, 1), (0, 0)), ((0, 0), (1, 1))]


def same(height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The padding with which a filter of this size keeps the size of its input."""
    rows, columns = (height - 1) // 2, (width - 1) // 2
    return (rows, height - 1 - rows), (columns, width - 1 - columns)


def assert_well_formed(operator: Callable[..., Any], arguments: Sequence[Any], *, gradients: bool) -> None:
    """Assert that an operator has a right schema and fake kernel, and with `gradients` a formula for these."""
    tests = ("test_schema", "test_faketensor", *(("test_autograd_registration",) if gradients else ()))
    found = torch.library.opcheck(operator, tuple(arguments), test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}, found


def numbers(size: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that TF32 holds exactly, or a pool on a GPU could choose another winner than float64 does."""
    return (torch.randn(size, device=DEVICE) * 64).round().div(64).to(dtype)


def inputs(
    size: Sequence[int] = (2, 8, 6, 6), filters: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, list[Tensor], Tensor]:
    """An input, the weights of a vertical and a horizontal group, and the bias."""
    x = numbers(size, dtype).contiguous(memory_format=torch.channels_last)
    weights = [numbers((filters, size[1], *shape), dtype) for shape in ((3, 1), (1, 3))]
    return x, weights, numbers(2 * filters)


def exact_numbers(*shape: int) -> Tensor:
    """Random numbers whose products tensor cores take exactly: rounding moves no result across ReLU's zero."""
    return torch.randn(shape, device=DEVICE).bfloat16().float()


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def posed(
    size: Sequence[int],
    groups: Sequence[tuple[int, int, int]],
    *,
    bias: bool = True,
    residual: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> SimpleNamespace:
    """A layer of random numbers: its tensors, its problem, and its result and gradients in float64.

    Groups are (height, width, filters); the padding keeps the size unless the options say otherwise.
    """
    x = channels_last(exact_numbers(*size)).to(dtype)
    weights = [exact_numbers(f, size[1], h, w).div(8).to(dtype) for h, w, f in groups]
    b = exact_numbers(sum(f for *_, f in groups)) if bias else None
    options = {"stride": (1, 1), "padding": [same(h, w) for h, w, _ in groups], **options}
    problem = describe(x, weights, residual=residual, **options)
    added = None
    if residual:
        added = channels_last(torch.randn(size[0], problem.filters, *problem.result_size, device=DEVICE).to(dtype))
    wide = [None if t is None else t.double().requires_grad_() for t in (x, b, *weights)]
    right = composite_reference(
        wide[0], wide[2:], wide[1], **options, residual=None if added is None else added.double()
    )
    grad = torch.randn_like(right).to(dtype)
    leaves = [t for t in wide if t is not None]
    gradients = torch.autograd.grad(right, leaves, grad.double(), retain_graph=True)
    return SimpleNamespace(
        x=x, weights=weights, bias=b, residual=added, problem=problem, options=options,
        right=right.detach(), grad=grad, gradients=gradients,
    )  # fmt: skip


def winners(layer: SimpleNamespace) -> Tensor:
    """The codes of a layer's pool in float64: the winner's place in its 2x2 window, 4 if the ReLU cut it."""
    options = {name: layer.options[name] for name in ("stride", "padding")}
    bias = None if layer.bias is None else layer.bias.double()
    before = composite_reference(layer.x.double(), [w.double() for w in layer.weights], bias, **options)
    height, width = layer.problem.result_size
    whole = torch.nn.functional.pad(before, (0, 1, 0, 1), value=-torch.inf)[:, :, : 2 * height, : 2 * width]
    value, place = whole.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2).max(-1)
    return torch.where(value > 0, place, 4).permute(0, 2, 3, 1)


def assert_close(ours: Tensor, right: Tensor, limit: float | None = None) -> None:
    """Assert that a tensor is near another, relative to its norm: TF32 on a GPU, float32 elsewhere."""
    limit = limit or (2e-3 if GPU else 1e-5)
    assert ours.shape == right.shape
    distance = torch.linalg.vector_norm(ours.detach().double() - right.detach().double())
    assert distance <= limit * torch.linalg.vector_norm(right.detach().double()).clamp_min(1e-6)
