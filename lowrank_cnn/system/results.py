"""What networks give: tensors in tuples, lists, dictionaries and dataclasses.

torch's trees take a dataclass for a single value, unless its library registered it, as Hugging Face does.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


def flattened(result: Any) -> tuple[list[Any], Any]:
    """The values in a result, and its structure, which is equal for results of the same classes and lengths.

    >>> flattened({"maps": [1, 2], "logits": 3})[0]
    [1, 2, 3]
    """
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
    return tree_map(lambda leaf: function(leaf) if _fields(leaf) is None else _rebuilt(function, leaf), result)


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass; None for any other value, and for the class itself."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _rebuilt(function: Callable[[Any], Any], record: Any) -> Any:
    new = copy.copy(record)
    for name, value in (_fields(record) or {}).items():
        object.__setattr__(new, name, mapped(function, value))  # it may be frozen
    return new
