"""The tensors of a network's result by name, in tuples, lists, dictionaries or dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lowrank_cnn.system.errors import LowRankError


def is_flat(result: Any) -> bool:
    """Whether a result is a tuple of tensors, or a dictionary of tensors by name."""
    if type(result) is dict:
        return all(isinstance(key, str) and isinstance(value, Tensor) for key, value in result.items())
    return type(result) is tuple and all(isinstance(value, Tensor) for value in result)


def plain_outputs(result: Any) -> Any:
    """A result as a tensor, a tuple of tensors (of a tuple or list), or a dictionary of tensors by name."""
    found = named_tensors(result)
    if isinstance(result, Tensor):
        return result
    return tuple(found.values()) if _is_sequence(result) else found


def named_tensors(result: Any, name: str = "output") -> dict[str, Tensor]:
    """The tensors of a result by name: keys, fields and places, joined by underscores; what is None is left out.

    >>> list(named_tensors({"logits": torch.ones(1), "maps": (torch.ones(2), torch.ones(2))}))
    ['logits', 'maps_0', 'maps_1']
    """
    found: dict[str, Tensor] = {}
    for key, value in _leaves(result, ""):
        key = key or name
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise LowRankError(
                f"the network gives a {kind} ({key}), and a file holds tensors alone: export a module without it."
            )
        found[key if key not in found else f"{key}_{len(found)}"] = value
    if not found:
        raise LowRankError("the network gives no tensor.")
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    if isinstance(value, Tensor):
        yield name, value
        return
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif dataclasses.is_dataclass(value):
        parts = [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    elif hasattr(value, "_fields"):
        parts = [(each, getattr(value, each)) for each in value._fields]
    elif _is_sequence(value):
        parts = [(str(place) if name else f"output_{place}", part) for place, part in enumerate(value)]
    else:
        yield name, value
        return
    for key, part in parts:
        yield from _leaves(part, f"{name}_{key}" if name else key)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")
