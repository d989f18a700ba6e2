"""Find the class scores among the outputs of a network: one tensor, several in a row, or several by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowrank_cnn.system.errors import LowRankError

LOGITS = "logits"
"""The usual name of class scores, which needs no choice."""
_NUMBERED = re.compile(r"output_(\d+)")
"""Exported files name the outputs of a tuple so."""


def class_scores(outputs: Any, output: str | None = None) -> Tensor:
    """The tensor of class scores: the output of this name or number, else the only one, the first, or "logits".

    >>> import torch
    >>> scores = torch.zeros(1, 10)
    >>> class_scores({"features": torch.zeros(1, 64), "head": scores}, "head").shape
    torch.Size([1, 10])
    """
    if isinstance(outputs, Tensor):
        if output not in (None, "0"):
            raise LowRankError(f"the network has one output, so that there is no output {output!r} to choose.")
        return outputs
    named = _by_name(outputs)
    in_a_row = isinstance(outputs, tuple | list) or all(map(_NUMBERED.fullmatch, named))
    name = _default(named, in_a_row) if output is None else _numbered(named, output)
    found = named.get(name) if name is not None else None
    if isinstance(found, Tensor):
        return found
    known = ", ".join(named) or f"a {type(outputs).__name__}"
    if output is not None:
        raise LowRankError(f"the network has no tensor as output {output!r}: its outputs are {known}.")
    raise LowRankError(
        f"the network returns {known}, and accuracy needs one tensor of class scores: name it by output=NAME "
        "(--output NAME; in training --set output=NAME)."
    )


def ranking(scores: Tensor) -> Tensor:
    """The classes [n, classes] of each image, the likeliest first; of equal scores, which half precision has many
    of, the class of the lower number, as `argmax` chooses. `topk` chooses any.

    >>> import torch
    >>> ranking(torch.tensor([[1.0, 3.0, 3.0]])).tolist()
    [[1, 2, 0]]
    """
    return scores.sort(dim=1, descending=True, stable=True).indices


def _by_name(outputs: Any) -> dict[str, Any]:
    """The outputs by name; those of a tuple are numbered as in an exported file."""
    if isinstance(outputs, Mapping):
        return {str(name): value for name, value in outputs.items()}
    if dataclasses.is_dataclass(outputs):
        return {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    if fields := getattr(outputs, "_fields", None):
        return dict(zip(fields, outputs, strict=True))
    if isinstance(outputs, tuple | list):
        return {f"output_{number}": value for number, value in enumerate(outputs)}
    return {}


def _default(named: Mapping[str, Any], in_a_row: bool) -> str | None:
    """The output that needs no choice; of outputs in a row, the first."""
    if LOGITS in named:
        return LOGITS
    return next(iter(named), None) if in_a_row or len(named) == 1 else None


def _numbered(named: Mapping[str, Any], output: str) -> str | None:
    """The name of an output that is given by name or by number."""
    if output in named:
        return output
    number = int(output) if output.isdecimal() else len(named)
    return list(named)[number] if number < len(named) else None
