"""The inputs of a network (an image size, or example inputs), and small questions about modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes

InputSize = Sequence[int] | Tensor | tuple[Any, ...] | Mapping[str, Any]
"""(channels, height, width) of one image, or (channels, ...) with any number of axes; or an example input; or a
tuple (or a dictionary by keyword) of the arguments that the forward takes, with at least one tensor among them."""
_LARGEST_SIDE = 2**20
Key = TypeVar("Key")


def checked_size(inputs: object) -> tuple[int, ...]:
    """The size of one input without its batch: as it was given, or that of the first tensor of an example."""
    if is_example(inputs):
        return tuple(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)).shape[1:])
    size = tuple(inputs) if isinstance(inputs, Sequence) else ()
    if not size or any(isinstance(v, bool) or not isinstance(v, int) or not 1 <= v <= _LARGEST_SIDE for v in size):
        raise LowRankError(
            "an input size is (channels, height, width), like (3, 224, 224), or an example input, "
            f"not {inputs!r:.60}."
        )
    return size


def is_example(inputs: object) -> bool:
    """Whether these are tensors to run on, and not the size of an image."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(inputs))


def arguments(
    inputs: InputSize, *, device: torch.device | str, dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward on a device, by position and by keyword: a copied example, or a random image."""
    if is_example(inputs):
        given = inputs if isinstance(inputs, tuple | Mapping) else (inputs,)
        moved: Any = tree_map(
            lambda value: value.detach().to(device, copy=True) if isinstance(value, Tensor) else value, given
        )
        return ((), dict(moved)) if isinstance(moved, Mapping) else (moved, {})
    image = torch.empty(1, *checked_size(inputs), device=device, dtype=dtype)
    return (image if image.is_meta else image.normal_(),), {}


def call(network: Callable[..., Any], inputs: Any) -> Any:
    """Call a network on a batch: one tensor, several by position, or a dictionary of them by keyword."""
    if isinstance(inputs, Mapping):
        return network(**inputs)
    return network(*inputs) if isinstance(inputs, tuple | list) else network(inputs)


def blank(inputs: InputSize, device: torch.device | str) -> Any:
    """A black image of a size; of an example, a copy of its own values."""
    if not is_example(inputs):
        return torch.zeros(1, *checked_size(inputs), device=device)
    return tree_map(lambda value: value.to(device, copy=True) if isinstance(value, Tensor) else value, inputs)


def batch_length(inputs: Any) -> int:
    """The number of items in a batch of one input or several."""
    return next(len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))


def in_words(inputs: InputSize) -> str:
    """A size, or the sizes of the inputs of an example.

    >>> in_words((3, 32, 32))
    'images of 3x32x32'
    >>> in_words((torch.zeros(1, 3, 8, 8), torch.zeros(1, 5)))
    'inputs of 3x8x8 and 5'
    """
    tensors = [leaf.shape[1:] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    sizes = ["x".join(map(str, size)) or "one number" for size in tensors or [checked_size(inputs)]]
    return f"{'inputs' if tensors else 'images'} of {' and '.join(sizes)}"


def known_inputs(model: nn.Module, inputs: InputSize | None, purpose: str = "a budget") -> InputSize:
    """The inputs to run a network on: those given, or the size that the network is known to take."""
    found = notes(model).input_size if inputs is None else inputs
    if found is None:
        raise LowRankError(f"{purpose} needs the size of the images (channels, height, width): give input_size.")
    checked_size(found)
    return found


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A layer's first argument, by position or keyword (`conv(input=x)`); for hooks registered `with_kwargs`."""
    return next(iter((*args, *kwargs.values())))


@contextmanager
def watched(layers: Mapping[Key, nn.Module], see: Callable[[Key, Any], None]) -> Iterator[None]:
    """Within the block, call `see` with the key and the first input of a layer before each of its calls."""
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, key=key: see(key, first_input(args, kwargs)), with_kwargs=True
        )
        for key, layer in layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_part_of(name: str, parent: str) -> bool:
    """Whether a dotted name is that of a module or of one of its parts."""
    return name == parent or name.startswith(f"{parent}.")


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether a module computes what its kind does, and has no hooks."""
    return isinstance(module, kind) and computes_as(module, kind) and not has_hooks(module)


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module has every method of its kind that takes part in a call; a conv has more than a forward."""
    own, its = type(module), vars(module)
    return all(getattr(own, name, None) is getattr(kind, name, None) and name not in its for name in _COMPUTING)


_COMPUTING = ("forward", "_conv_forward", "_output_padding", "__call__", "_call_impl", "__getattr__")


def check_module(model: object) -> None:
    """Refuse objects that are not modules, scripted modules, and lazy ones that have no weights yet."""
    if not isinstance(model, nn.Module):
        raise LowRankError(f"a model is an nn.Module, not {type(model).__name__}.")
    for name, module in model.named_modules():
        label = name or "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise LowRankError(f"{label} is scripted: give the module that it was made from.")
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            raise LowRankError(f"{label} is lazy: run the model once, so that it knows its channels.")


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run when the module is called."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)
