"""Compare the results of two networks, or layers, that should compute the same.

Every check of the project goes through `difference`. A result that is not finite never agrees with anything:
NaN and infinity give an infinite difference, and so do results of other shapes or structures.

Trial runs leave no trace: networks run within `unchanged`, on `copied` inputs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_map

from lowrank_cnn.core.errors import LostDeviceError, first_line

# Networks return tensors in tuples, lists, dictionaries and dataclasses. torch's pytrees treat a dataclass as one
# value, unless its library registered it, as Hugging Face does.


def flattened(result: Any) -> tuple[list[Any], Any]:
    """The values in a result, and its structure, which is equal for results of the same classes and lengths."""
    values: list[Any] = []
    inner = []
    leaves, structure = tree_flatten(result)
    for leaf in leaves:
        fields = _fields(leaf)
        found, below = ([leaf], None) if fields is None else flattened(fields)
        values += found
        inner.append((None if fields is None else type(leaf), below))
    return values, (structure, inner)


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors in a result."""
    return [value for value in flattened(result)[0] if isinstance(value, Tensor)]


def mapped(function: Callable[[Any], Any], result: Any) -> Any:
    """A result of the same structure with other values."""

    def changed(leaf: Any) -> Any:
        if (fields := _fields(leaf)) is None:
            return function(leaf)
        new = copy.copy(leaf)
        for name, value in fields.items():
            object.__setattr__(new, name, mapped(function, value))  # it may be frozen
        return new

    return tree_map(changed, result)


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass; None for any other value, and for the class itself."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


ROUNDED = 0.05
"""How far results in half precision may be off."""
_TINY = 1e-30


def difference(ours: Any, right: Any, *, by: Literal["largest", "norm"] = "largest") -> float:
    """How far `ours` is from `right`, relative to `right`: tensors, or containers of tensors.

    By the largest difference over the largest value ("largest"), or by the norms of both ("norm"). The largest
    difference of several tensors counts. Values that are no floating-point tensors must be equal.
    """
    left, left_structure = flattened(ours)
    expected, structure = flattened(right)
    if left_structure != structure:
        return float("inf")
    return max((_of_leaves(a, b, by) for a, b in zip(left, expected, strict=True)), default=0.0)


def agree(ours: Any, right: Any, *, single: float = 1e-3) -> bool:
    """Whether two results differ by no more than rounding does; `single` is the limit in float32."""
    return difference(ours, right) <= tolerance(right, single=single)


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
    """Why one network cannot replace another: it fails, or its results differ. Empty if both compute the same.

    Both run on the example, and on random numbers of its shape and scale: these show differences that an example
    of zeros or of one repeated value hides. They are skipped if `right` rejects them or its result is not finite.
    `single` is the limit in float32.
    """
    with unchanged(*(network for network in (ours, right) if isinstance(network, nn.Module))):
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
    """Copy every tensor of the inputs: a forward may change its arguments."""
    return mapped(lambda value: value.detach().clone() if isinstance(value, Tensor) else value, inputs)


_DICTS, _LISTS = (dict, OrderedDict, defaultdict, Counter), (list, deque)


@contextlib.contextmanager
def unchanged(*networks: nn.Module, evaluating: bool = False, on_meta: bool = False) -> Iterator[None]:
    """Run networks within the block and leave no trace: not in them, and not in the random generators.

    A forward may count its calls in a buffer, keep a tensor in an attribute, append to a list or draw numbers. All
    of that is restored by identity, with the mode of every module. Two things are not: the values of parameters,
    which training alone changes, and what our own layers keep for later (packed weights).

    - `evaluating`: put the networks into evaluation mode within the block.
    - `on_meta`: put all of their tensors on the meta device within the block.
    """
    ready = [one for one in networks if not any(map(is_lazy, chain(one.parameters(), one.buffers())))]
    kept = _state_of(ready, on_meta)  # a first run gives lazy networks their shapes, and that stays
    tensors = [value for value, _ in kept if isinstance(value, Tensor)]
    gpus = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    numpy = sys.modules.get("numpy")
    host = random.getstate(), numpy and numpy.random.get_state()
    with torch.random.fork_rng(gpus):
        try:
            if on_meta:
                _lend(kept, {id(tensor): tensor.to("meta") for tensor in tensors})
            for network in networks if evaluating else ():
                network.eval()
            yield
        finally:
            _restore(kept)
            random.setstate(host[0])
            if numpy:
                numpy.random.set_state(host[1])


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within the block, and restore the mode of every module after it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _state_of(networks: Sequence[nn.Module], on_meta: bool) -> list[tuple[Any, Any]]:
    """Everything that a forward may change in networks, each with its content of now."""
    found: dict[int, tuple[Any, Any]] = {}
    rest: list[Any] = [*networks]
    while rest:
        value = rest.pop()
        if id(value) in found:
            continue
        if isinstance(value, nn.Module):
            found[id(value)] = value, value.training
            ours = type(value).__module__.startswith("lowrank_cnn.") and not on_meta
            rest += [*value.buffers(recurse=False), *(value.children() if ours else [vars(value)])]
        elif isinstance(value, Tensor):
            as_it_is = on_meta or value.is_meta or isinstance(value, nn.Parameter)
            found[id(value)] = value, None if as_it_is else value.detach().clone()
        elif isinstance(value, torch.Generator):
            found[id(value)] = value, value.get_state()
        elif type(value) in _DICTS:
            found[id(value)] = value, dict(value)
            rest += value.values()
        elif type(value) in (*_LISTS, set, tuple):
            found[id(value)] = value, type(value)(value)
            rest += value
    return list(found.values())


def _lend(kept: Sequence[tuple[Any, Any]], lent: dict[int, Tensor]) -> None:
    """Put other tensors in the place of those that networks hold."""

    def other(item: Any) -> Any:
        return tuple(map(other, item)) if type(item) is tuple else lent.get(id(item), item)

    for value, content in kept:
        if type(value) in (*_DICTS, *_LISTS):
            for key, item in content.items() if type(value) in _DICTS else enumerate(content):
                value[key] = other(item)


@torch.no_grad()
def _restore(kept: Sequence[tuple[Any, Any]]) -> None:
    for value, content in kept:
        if isinstance(value, nn.Module):
            value.training = content
        elif isinstance(value, Tensor):
            if content is not None and not _is_still(value, content):
                if value.shape == content.shape:
                    value.copy_(content)
                else:
                    value.data = content
        elif isinstance(value, torch.Generator):
            value.set_state(content)
        elif type(value) is not tuple and _ids(value) != _ids(content):
            value.clear()
            (value.extend if type(value) in _LISTS else value.update)(content)


def _is_still(value: Tensor, content: Tensor) -> bool:
    """Whether a tensor has its values of before; writing them again would stop a backward pass that needs it."""
    same = value.shape == content.shape and value.dtype == content.dtype and value.device == content.device
    return same and value.layout == torch.strided and torch.equal(value, content)


def _ids(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [(id(key), id(item)) for key, item in container.items()]
    return [*map(id, container)]


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
