"""Compare the results of two networks, or layers, that should compute the same.

Every check of the project goes through `difference`. A result that is not finite never agrees with anything:
NaN and infinity give an infinite difference, and so do results of other shapes or structures.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from lowrank_cnn.system.errors import LostDeviceError, first_line
from lowrank_cnn.system.results import flattened, tensors_of

ROUNDED = 0.05
"""How far results in half precision may be off."""
_TINY = 1e-30


def difference(ours: Any, right: Any, *, by: Literal["largest", "norm"] = "largest") -> float:
    """How far `ours` is from `right`, relative to `right`: tensors, or what holds tensors (`system.results`).

    By the largest difference over the largest value ("largest"), or by the norms of both ("norm"). Of several
    tensors the worst counts. Values that are no floating-point tensors must be equal.

    >>> difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    1.0
    >>> difference(torch.tensor([float("nan")]), torch.tensor([0.0]))
    inf
    """
    left, left_structure = flattened(ours)
    expected, structure = flattened(right)
    if left_structure != structure:
        return float("inf")
    return max((_of_leaves(a, b, by) for a, b in zip(left, expected, strict=True)), default=0.0)


def agree(ours: Any, right: Any, *, single: float = 1e-3, by: Literal["largest", "norm"] = "largest") -> bool:
    """Whether two results differ by no more than rounding does; `single` is the limit in float32."""
    return difference(ours, right, by=by) <= tolerance(right, single=single)


def tolerance(right: Any, *, single: float = 1e-3) -> float:
    """How far a result may be off, by the least precise floating-point type in it."""
    limits = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: single, torch.complex64: single}
    kinds = [tensor.dtype for tensor in tensors_of(right) if _inexact(tensor)]
    return max((limits.get(kind, ROUNDED) for kind in kinds), default=0.0)


def is_finite(result: Any) -> bool:
    """Whether a result has no NaN and no infinity."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors_of(result) if _inexact(tensor))


@torch.no_grad()
def objection(ours: Callable[..., Any], right: Callable[..., Any], *example: Any, single: float = 1e-3) -> str:
    """Why one network is not another: it fails, or its results differ; empty where both compute the same.

    Both run on the example, and on random numbers of its shape and scale: these show differences that an example
    of zeros or of one repeated value hides. They are left out where `right` does not take them or gives no finite
    result for them. `single` is the limit in float32.
    """
    expected = right(*copied(*example))
    inputs = [(example, expected)]
    other = tuple(random_like(value) for value in example)
    with contextlib.suppress(Exception):  # a forward may refuse random values in any way of its own
        drawn = right(*copied(*other))
        inputs += [(other, drawn)] if is_finite(drawn) else []
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where a captured graph fails, fx prints its source
            error = max(difference(ours(*copied(*given)), result) for given, result in inputs)
    except LostDeviceError:
        raise
    except Exception as failure:  # a view of maps that now lie in another memory format, say
        return f"it fails: {first_line(failure)}"
    return "" if error <= tolerance(expected, single=single) else f"its results would differ by {error:.1e}"


def copied(*inputs: Any) -> tuple[Any, ...]:
    """The inputs with every tensor copied: a forward may change what it is given."""
    return tuple(value.detach().clone() if isinstance(value, Tensor) else value for value in inputs)


def _of_leaves(ours: Any, right: Any, by: str) -> float:
    if not isinstance(right, Tensor) or not isinstance(ours, Tensor):
        return 0.0 if _equal(ours, right) else float("inf")
    if ours.shape != right.shape or ours.is_floating_point() != right.is_floating_point():
        return float("inf")
    if not _inexact(right):
        return 0.0 if torch.equal(ours.cpu(), right.cpu()) else float("inf")
    if not right.numel():
        return 0.0
    kind = torch.complex128 if right.is_complex() or ours.is_complex() else torch.float64
    a, b = ours.detach().to(right.device, kind), right.detach().to(kind)
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        return float("inf")
    size = torch.linalg.vector_norm if by == "norm" else lambda values: values.abs().max()
    error = float(size(a - b) / size(b).clamp_min(_TINY))
    return float("inf") if math.isnan(error) else error  # norms of huge values overflow


def _equal(ours: Any, right: Any) -> bool:
    try:
        return type(ours) is type(right) and bool(ours == right)
    except Exception:  # objects may compare in any way of their own
        return False


def _inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def random_like(value: Any, *, seed: int | None = None) -> Any:
    """Random numbers with the mean and deviation of an input. Values that are not floating-point tensors stay."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    # On the device of the value: a CPU takes a second for a batch of 256 photos.
    place = value.device if value.is_cuda else torch.device("cpu")
    numbers = torch.Generator(place).manual_seed(value.numel() if seed is None else seed)
    drawn = torch.randn(value.shape, generator=numbers, dtype=torch.float64, device=place)
    exact = value.to(place).double()
    spread = float(exact.std()) if value.numel() > 1 else 1.0
    spread = spread if 0 < spread < float("inf") else 1.0
    shifted = float(exact.mean()) + spread * drawn
    return torch.empty_like(value).copy_(shifted)
