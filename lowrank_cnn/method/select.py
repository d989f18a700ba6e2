"""Choose the convolutions of a network to rewrite, and say why the others stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from lowrank_cnn.core.errors import LowRankError, nearest
from lowrank_cnn.core.modules import InputSize, check_module, has_hooks, known_inputs
from lowrank_cnn.method.branches import BranchedConv2d
from lowrank_cnn.method.chains import FactoredLayer
from lowrank_cnn.method.count import count
from lowrank_cnn.method.layers import CompositeConv2d, is_torch_layer
from lowrank_cnn.method.rewrite import Kept, low_rank_layers
from lowrank_cnn.method.schemes import FactoredConv2d, Scheme, is_depthwise

LARGE = 7
"""Kernels from which strips of a depthwise conv are worth two layers."""


class NothingToConvertError(LowRankError):
    """No convolution of the network can be replaced."""


Kernel = int | tuple[int, ...]
Where = str | Kernel | Collection[str | Kernel] | Callable[[str, nn.Conv2d], bool] | None
"""Which convs: by name, prefix or pattern, by kernel, by several of these, or by a function of name and conv."""


def select(
    model: nn.Module, scheme: Scheme, where: Where = None, *, trained_on: bool = False
) -> tuple[dict[str, nn.Conv2d], tuple[Kept, ...]]:
    """The convs to rewrite by name, and those that stay; where they are `trained_on`, frozen ones do."""
    check_rewritable(model)
    for name, module in model.named_modules():
        home = type(module).__module__
        if "Conv" in type(module).__name__ and (".quantized" in home or ".qat" in home):
            label = name or "the model"
            raise LowRankError(f"{label} is quantised: convert the model in floating point, then quantise it.")
    convs = _convs(model, scheme)
    if not convs:
        raise _nothing(model, f"{type(model).__name__} has no convolutions to convert.")
    asked_for, ties = _selector(where, convs), parameter_uses(model)
    values = chain.from_iterable(vars(module).values() for module in model.modules())
    bound = {id(value.__self__) for value in values if isinstance(value, MethodType)}
    chosen: dict[str, nn.Conv2d] = {}
    kept = []
    for name, conv in convs.items():
        reason = _obstacle(conv, scheme, ties)
        if not reason and id(conv) in bound:
            reason = "an attribute of the model is one of its methods"
        if not reason and trained_on and not conv.weight.requires_grad:
            reason = "it is frozen, and what replaces it has to train: unfreeze it, or fit it with decompose"
        if not reason and not asked_for(name, conv):
            reason = _why_not(conv) if where is None else "not selected"
        if reason:
            kept.append(Kept(name, type(conv).__name__, reason))
        else:
            chosen[name] = conv  # type: ignore[assignment]
    if not chosen:
        examples = {row.reason: row.name or row.layer for row in reversed(kept)}  # the first layer of each reason
        told = [f"{examples[reason]}: {reason}" for reason in dict.fromkeys(row.reason for row in kept)]
        raise _nothing(model, f"nothing can be converted: {'; '.join(told[:3])}.")
    return chosen, tuple(kept)


def _nothing(model: nn.Module, told: str) -> NothingToConvertError:
    if layers := low_rank_layers(model):
        told = (
            f"the network is low-rank already ({len(layers)} of its layers), and nothing is left to convert: for "
            "another scheme, start from its dense twin."
        )
    return NothingToConvertError(told)


def stages(model: nn.Module, input_size: InputSize | None = None) -> tuple[tuple[str, ...], ...]:
    """The names of the spatial convs by stage, in the order of execution; a stage has maps of one size.

    Any of them can be given to `convert` and `decompose` as `where`, to rewrite a stage.

    >>> import lowrank_cnn as lr
    >>> for stage in lr.stages(lr.create_model("nin")):
    ...     print(*stage)
    features.conv1_1
    features.conv2_1
    features.conv3_1
    """
    check_module(model)
    size = known_inputs(model, input_size, "finding stages")
    convs = _convs(model)
    found: dict[tuple[int, ...], list[str]] = {}
    for row in count(model, size).layers:
        if row.name in convs and min(convs[row.name].kernel_size) > 1:
            found.setdefault(row.output[1:], []).append(row.name)
    return tuple(map(tuple, found.values()))


def check_values(model: nn.Module) -> None:
    """Refuse a network of which a part is on the meta device, as one that was built there and loaded in part."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise LowRankError(
                f"{name} is on the meta device and has no values: load the weights first, or make some by "
                'model.to_empty(device="cpu") and lr.init_(model).'
            )


def check_rewritable(model: object) -> None:
    """Refuse what `check_module` refuses, and compiled modules, which would go on running the original's code."""
    check_module(model)
    assert isinstance(model, nn.Module)
    if compiled := [name for name, module in model.named_modules() if hasattr(module, "_orig_mod")]:
        label = compiled[0] or "the model"
        raise LowRankError(f"{label} is compiled, which cannot be rewritten: do this first, then compile it.")


def _convs(model: nn.Module, scheme: Scheme | None = None) -> dict[str, _ConvNd]:
    """Every conv by name, or every layer that a scheme may take; parts of low-rank layers are left out."""
    kinds = (_ConvNd,) if scheme is None else scheme.layers
    # Attention reads the weights of its layers itself.
    whole = FactoredConv2d | CompositeConv2d | BranchedConv2d | FactoredLayer | nn.MultiheadAttention
    inside = {id(part) for m in model.modules() if isinstance(m, whole) for part in m.modules()}
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds) and id(m) not in inside}  # type: ignore[return-value]


def parameter_uses(model: nn.Module) -> Counter[int]:
    """How many layers hold each parameter."""
    return Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)


def _obstacle(conv: _ConvNd, scheme: Scheme, ties: Counter[int]) -> str:
    """The reason why a conv cannot be rewritten; empty if it can."""
    if parametrize.is_parametrized(conv) or not isinstance(conv._parameters.get("weight"), nn.Parameter):
        return "its weight is computed from others: remove the parametrisation first"
    if conv.weight.is_complex():
        return "its weights are complex, and low-rank filters are real"
    if not is_torch_layer(conv):
        base = "nn.Conv2d" if isinstance(conv, nn.Conv2d) else "the layer of torch that it derives from"
        return f"its class {type(conv).__name__} computes something else than {base}"
    if reason := scheme.obstacle(conv):
        return reason
    if ties[id(conv.weight)] > 1:
        return "it shares its weight with another layer"
    if has_hooks(conv):
        return "it has hooks, which would be lost"
    return ""


def _selector(where: Where, convs: Mapping[str, nn.Module]) -> Callable[[str, _ConvNd], bool]:
    if where is None:
        return lambda name, conv: not _why_not(conv)
    if callable(where):
        return lambda name, conv: bool(where(name, conv))  # type: ignore[arg-type]
    single = isinstance(where, str | bytes | Mapping) or _is_kernel(where) or not isinstance(where, Iterable)
    wanted: list[Any] = [where] if single else list(where)  # type: ignore[arg-type]
    if not all(isinstance(item, str) or _is_kernel(item) for item in wanted):
        raise LowRankError(
            "where is a name or pattern, a kernel (3 or (3, 5)), a list of these, or f(name, conv) -> bool, "
            f"not {where!r}."
        )
    patterns = [item for item in wanted if isinstance(item, str)]
    sizes = [item for item in wanted if not isinstance(item, str)]
    kernels = [own for item in sizes for own in ([(item,) * 2, (item,) * 3] if isinstance(item, int) else [item])]
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in convs):
            raise LowRankError(f"no convolution is called {pattern!r}; {nearest(pattern, convs)}")
    return lambda name, conv: (
        getattr(conv, "kernel_size", None) in kernels or any(_matches(name, pattern) for pattern in patterns)
    )


def _is_kernel(item: object) -> bool:
    sides = item if isinstance(item, tuple) and len(item) in (2, 3) else (item,)
    return all(isinstance(side, int) and not isinstance(side, bool) for side in sides)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern is a layer's name, matches it, or names a module that contains the layer."""
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _why_not(conv: nn.Module) -> str:
    """The reason why a conv stays unless the caller names it; empty if it is rewritten by default.

    Windows that do not overlap project patches: narrower filters would never see most of the image. A small
    depthwise kernel has little to save. No fused kernel runs low-rank layers with channel groups: on a GPU a
    converted RegNet trained three times slower than the dense one.
    """
    if not isinstance(conv, _ConvNd) or isinstance(conv, _ConvTransposeNd):
        return ""
    if is_depthwise(conv) and max(conv.kernel_size) < LARGE:
        return "it is depthwise with a small kernel: name it to convert it"
    if 1 < conv.groups < conv.in_channels and isinstance(conv, nn.Conv2d) and min(conv.kernel_size) > 1:
        return "it has channel groups, in which strips are slow on a GPU: name it to convert it"
    patches = zip(conv.stride, conv.kernel_size, strict=True)
    if max(conv.kernel_size) > 1 and all(step >= size for step, size in patches):
        return "it projects patches: name it to convert it"
    return ""
