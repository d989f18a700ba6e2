"""An input on which a transformed network is compared with the original: the user's, or one that fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.system.compare import is_finite
from lowrank_cnn.system.errors import LowRankError, first_line
from lowrank_cnn.system.provenance import notes

_SIZES = (32, 64, 28, 224, 299)
"""Heights and widths that networks commonly take, in the order in which they are tried."""


def example_for(model: nn.Module, given: Tensor | tuple[Any, ...] | None) -> tuple[tuple[Any, ...] | None, bool]:
    """The inputs to compare on, and whether the user gave them; None where no input is known that runs."""
    if given is not None:
        example = given if isinstance(given, tuple) else (given,)
        check_runs(model, *example)
        return example, True
    return next((example for example in _guesses(model) if _runs(model, *example)), None), False


def check_runs(model: nn.Module, *example: Any) -> None:
    """Refuse inputs on which the network fails or gives nothing that can be compared, in a sentence."""
    for value in example:
        if not isinstance(value, Tensor):
            raise LowRankError(f"an example input is a tensor, not {type(value).__name__}.")
        if value.numel() == 0:
            raise LowRankError(f"an example input of {_shape(value)} is empty.")
    try:
        with torch.no_grad():
            result = model(*example)
    except LowRankError:
        raise
    except Exception as error:  # whatever the forward makes of another size, dtype or device
        kind = str(example[0].dtype).removeprefix("torch.")
        reason = first_line(error)
        raise LowRankError(
            f"the network does not run on an input of {_shape(example[0])}, {kind}: {reason}"
        ) from error
    if not is_finite(result):
        raise LowRankError(
            "the network gives NaN or infinite values for the example input, so nothing can be compared with it: "
            "check its weights, or give another example."
        )


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "no dimensions"


def _guesses(model: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    """Random inputs: of the size that is known, else of sizes that the first layer could take."""
    tensors = (t for t in chain(model.parameters(), model.buffers()) if t.is_floating_point())
    like = next(tensors, torch.zeros(()))
    for shape in _shapes(model):
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        yield (drawn.to(like.device, like.dtype),)


def _shapes(model: nn.Module) -> Iterator[tuple[int, ...]]:
    size = notes(model).input_size
    if size is not None:
        yield (2, *size)
        return
    kinds = {nn.Conv1d: 1, nn.Conv2d: 2, CompositeConv2d: 2, nn.Conv3d: 3}
    for module in model.modules():
        dimensions = next((count for kind, count in kinds.items() if isinstance(module, kind)), None)
        if isinstance(module, nn.Linear):
            yield (2, module.in_features)
            return
        if dimensions is not None:
            sizes = (16, 32, 64) if dimensions == 3 else _SIZES
            yield from ((2, module.in_channels, *[side] * dimensions) for side in sizes)  # type: ignore[misc]
            return


def _runs(model: nn.Module, *example: Any) -> bool:
    try:
        check_runs(model, *example)
    except LowRankError:
        return False
    return True
