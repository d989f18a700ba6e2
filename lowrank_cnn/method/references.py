"""Find references to layers that a deep copy does not follow, and calls of layers that were meant to be replaced.

`copy.deepcopy` copies modules, lists and partials, but takes a function as it is: a lambda that calls `self.conv`
goes on calling the conv of the original network, and a method bound to a conv goes on computing its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType

import torch
from torch import nn

from lowrank_cnn.method.inputs import InputSize, arguments
from lowrank_cnn.system.compare import unchanged
from lowrank_cnn.system.errors import LowRankError, first_line

_OWN = {"_parameters", "_buffers", "_modules"}


def held_by_functions(model: nn.Module) -> set[int]:
    """The ids of modules that a function kept in an attribute refers to; their submodules included.

    Hooks are left out: they often refer to the model, to store what they see, and rarely call its layers.
    """
    held: set[int] = set()
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in _OWN and not name.endswith("_hooks"):
                for found in _modules_behind(value, set()):
                    held |= {id(part) for part in found.modules()}
    return held


def call_own_modules(new: nn.Module, copies: Mapping[int, object]) -> None:
    """Let functions in attributes of a copied network call its modules, and not those of the original.

    `copies` are the parts of the copy by the ids of their originals, as `copy.deepcopy` notes them.
    """
    for module in new.modules():
        for name, value in list(vars(module).items()):
            if name not in _OWN and isinstance(value, FunctionType):
                vars(module)[name] = _with_own_modules(value, copies)


def _with_own_modules(function: FunctionType, copies: Mapping[int, object]) -> FunctionType:
    def own(value: object) -> object:
        return copies.get(id(value), value) if isinstance(value, nn.Module) else value

    cells = [CellType(own(cell.cell_contents)) if _filled(cell) else cell for cell in function.__closure__ or ()]
    defaults = tuple(map(own, function.__defaults__ or ()))
    closure = tuple(cells) if function.__closure__ else None
    new = FunctionType(function.__code__, function.__globals__, function.__name__, defaults or None, closure)
    named = function.__kwdefaults__
    new.__kwdefaults__ = {name: own(value) for name, value in named.items()} if named else named
    new.__dict__.update(function.__dict__)
    found = [*map(id, _kept(new))] != [*map(id, _kept(function))]
    return new if found else function


def _kept(function: FunctionType) -> list[object]:
    """What a function refers to by its closure and its defaults."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _modules_behind(value: object, seen: set[int], *, inside: bool = False) -> Iterator[nn.Module]:
    """Modules reached through a function; a deep copy follows those that a container holds directly."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        if inside:
            yield value
    elif isinstance(value, FunctionType):
        for item in _kept(value):
            yield from _modules_behind(item, seen, inside=True)
    elif isinstance(value, MethodType):
        if isinstance(value.__self__, nn.Module):
            yield value.__self__
    elif isinstance(value, partial):
        for item in (value.func, *value.args, *value.keywords.values()):
            yield from _modules_behind(item, seen, inside=inside)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _modules_behind(item, seen, inside=inside)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _modules_behind(item, seen, inside=inside)


def _filled(cell: object) -> bool:
    try:
        cell.cell_contents  # type: ignore[attr-defined]  # noqa: B018
    except ValueError:  # a name that was never assigned
        return False
    return True


def check_calls(model: nn.Module, new: nn.Module, names: Sequence[str], input_size: InputSize) -> None:
    """Run the new network once on one image: it must call the new layers and none of those they replace.

    Where it fails and the original does not, the new layers are at fault; where both do, nothing can be said.
    """
    called: set[str] = set()
    old = {name: model.get_submodule(name) for name in names}
    hooks = [layer.register_forward_pre_hook(_marker(name, called)) for name, layer in old.items()]
    try:
        failure = _failure(new, input_size)
    finally:
        for hook in hooks:
            hook.remove()
    if called:
        raise LowRankError(
            f"the network still calls the original of {min(called)}, which something outside its modules holds "
            "(a global, say): leave that layer out of `where`."
        )
    if failure and not _failure(model, input_size):
        raise LowRankError(f"with its new layers the network fails: {failure}. Leave some out by `where`.")


@torch.no_grad()
def _failure(model: nn.Module, input_size: InputSize) -> str:
    """Why a network does not run on one image, empty if it does."""
    like = next(model.parameters())
    try:
        with unchanged(model, evaluating=True):
            args, kwargs = arguments(input_size, dtype=like.dtype, device=like.device)
            model(*args, **kwargs)
    except Exception as error:  # a forward may fail in any way of its own
        return first_line(error)
    return ""


def _marker(name: str, called: set[str]):
    def hook(_module: nn.Module, _inputs: object) -> None:
        called.add(name)

    return hook
