"""What an engine's writer is asked for: a network, an example call with names for its tensors, and free axes.

A network may take several inputs, by position or by keyword, and give a tensor, a tuple, a dictionary or a
dataclass (as Hugging Face's do). Files know tensors with names alone: `Call` names what goes in, `named_tensors`
what comes out.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_unflatten

from lowrank_cnn.core.compare import mapped, random_like, unchanged
from lowrank_cnn.core.errors import LowRankError, first_line
from lowrank_cnn.core.notes import note
from lowrank_cnn.core.text import counted
from lowrank_cnn.deploy.block_forms import groups_apart
from lowrank_cnn.graph.examples import arguments_of
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.models.build import name_of
from lowrank_cnn.models.network_file import dtype_of
from lowrank_cnn.train.int8 import Ranges

# The tensors of a network's result by name, in tuples, lists, dictionaries or dataclasses.


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


_AXES = {3: ("length",), 4: ("height", "width"), 5: ("depth", "height", "width")}
"""What the axes behind batch and channels are called, by the number of dimensions."""
FREE = ("batch", "length", "depth", "height", "width")
_BATCHES = (1, 3, *(n + more for n in (4, 8, 16, 32, 64, 128, 256, 512, 1024) for more in (0, 1)))
_SCALES = (0.75, 1.25, 0.5, 1.5, 2.0, 0.25, 3.0, 4.0, 8.0, 32.0)
"""Lengths of free axes at which a forward may take another path: batches, and others relative to the example."""
Axes = dict[str, dict[int, str]]
"""For each input, its axes of any length and their names."""


@dataclass(frozen=True)
class Call:
    """The inputs of a network: every tensor among them has a name, anything else is a constant."""

    leaves: tuple[Any, ...]
    structure: TreeSpec
    names: tuple[str, ...]

    @classmethod
    def of(cls, network: nn.Module, example: Any, names: Sequence[str] | None = None) -> Call:
        """From a tensor, a tuple (whose last entry may be a dictionary), or a dictionary of keywords."""
        args, kwargs = arguments_of(example)
        order = [*_bound(network, args, kwargs), *kwargs]  # that of the forward, which torch.export keeps
        kwargs = {name: kwargs[name] for name in dict.fromkeys(order) if name in kwargs}
        leaves, structure = tree_flatten((args, kwargs))
        found = list(_input_names(network, args, kwargs))
        if not found:
            raise LowRankError(f"an example input has tensors in it, not {type(example).__name__} alone.")
        if names is not None and (len(names) != len(found) or len(set(names)) < len(names)):
            raise LowRankError(
                f"the network takes {counted(len(found), 'input')}: give as many different input_names."
            )
        return cls(tuple(leaves), structure, tuple(names or found))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return dict(zip(self.names, (leaf for leaf in self.leaves if isinstance(leaf, Tensor)), strict=True))

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments."""
        return tree_unflatten(list(self.leaves), self.structure)  # type: ignore[return-value]

    def replaced(self, tensors: Mapping[str, Tensor]) -> Call:
        """The same call with other tensors."""
        rest = iter([tensors[name] for name in self.names])
        leaves = (next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)
        return replace(self, leaves=tuple(leaves))

    def copied(self) -> Call:
        """The same call with copies of its tensors, for a forward that may change them."""
        return self.replaced({name: tensor.detach().clone() for name, tensor in self.tensors.items()})

    def on_meta(self) -> Call:
        """The same call with tensors that have sizes alone."""
        return self.replaced({name: tensor.to("meta") for name, tensor in self.tensors.items()})

    def run(self, network: Any) -> Any:
        """What a network gives for this call."""
        args, kwargs = self.arguments
        return network(*args, **kwargs)

    def sized(self, axes: Axes, sizes: Mapping[str, float], *, seed: int | None = None) -> Call:
        """The call with free axes of other lengths: `batch` is a number, others are times what they were.

        Tensors are repeated or cut along such axes; with a seed, floating-point ones are random numbers.
        """
        made = {}
        for name, tensor in self.tensors.items():
            for axis, word in axes[name].items():
                if word in sizes:
                    length = tensor.shape[axis]
                    wanted = int(sizes[word] if word == "batch" else length * sizes[word])
                    tensor = tensor.index_select(axis, torch.arange(wanted, device=tensor.device) % length)
            made[name] = tensor if seed is None else random_like(tensor, seed=seed)
        return self.replaced(made)


@dataclass(frozen=True)
class ExportRequest:
    """What a file is to hold. `network` is in evaluation, its layers are torch's own, and the call runs on it."""

    network: nn.Module
    call: Call
    outputs: tuple[str, ...]
    axes: Axes
    opset: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    calibration: Sequence[tuple[Tensor, ...]] | None = None
    in_float: tuple[str, ...] = ()
    """Layers that int8 leaves in float."""
    ranges: Ranges = field(default_factory=dict)
    """Of int8: the range of a layer's input, where training found it; calibration sets all others."""
    strips: bool = False
    """Of .onnx: 1x3 and 3x1 convs by the operator of `lowrank_strips`."""
    captured: list[torch.export.ExportedProgram] = field(default_factory=list)
    """Programs of this network, also of the forms that a writer makes of it."""

    @property
    def name(self) -> str:
        """What the user calls the network."""
        return name_of(self.network)

    @cached_property
    def traced_call(self) -> Call:
        """The example with two of every free axis that has one: tracers take one for a constant."""
        made = {}
        for name, tensor in self.call.copied().tensors.items():
            for axis in self.axes[name]:
                tensor = tensor.repeat_interleave(2, axis) if tensor.shape[axis] == 1 else tensor
            made[name] = tensor
        return self.call.replaced(made)

    @property
    def free(self) -> list[str]:
        """The names of the free axes of all inputs."""
        return list(dict.fromkeys(word for axes in self.axes.values() for word in axes.values()))

    @property
    def tried_sizes(self) -> list[dict[str, float]]:
        """Lengths of free axes, as `Call.sized` takes them, at which a file has to run; {} is the example."""
        batches = [{"batch": 1.0}, {"batch": 3.0}] if "batch" in self.free else []
        inner = {word: 2.0 if place else 1.5 for place, word in enumerate(sorted({*self.free} - {"batch"}))}
        return [{}, *batches, *([inner] if inner else [])]

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The network as torch.export captures it, called as the network is; its outputs are plain containers."""
        args, kwargs = self.traced_call.arguments
        try:
            network = _with_signature(_plain(self.network, self.call), kwargs)
            with _quiet():
                program = torch.export.export(network, args, kwargs, dynamic_shapes=self._shapes(network))
        except LowRankError:
            raise
        except Exception as error:  # whatever a forward does that cannot be traced
            free = f" with free {' and '.join(self.free)}" if self.free else ""
            name = f"{self.name}{free}"
            raise LowRankError(f"torch.export cannot trace {name}: {first_line(error)}") from error
        for module in program.graph_module.modules():  # lines of source with their paths, which nobody else needs
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                node.meta.pop("stack_trace", None)
        self.captured.append(program)
        return program

    @property
    def other_paths(self) -> list[dict[str, float]]:
        """Lengths, as in `tried_sizes`, at which the forward may take another path than for the example.

        torch.export lists the comparisons of sizes that a capture has decided; this gives lengths that break one.
        Its own are those with 1, and a program (.pt2) runs where they hold alone. Without such a list, a few
        lengths below and above the example's are given.
        """
        inner = [word for word in self.free if word != "batch"]
        tried: list[dict[str, float]] = [{"batch": float(n)} for n in _BATCHES if "batch" in self.free]
        together = dict.fromkeys([*((word,) for word in inner), tuple(inner)] if inner else [])
        tried += [dict.fromkeys(words, scale) for scale in _SCALES for words in together]
        try:
            guards: list[str] = (self.captured or [self.program])[0]._guards_code if tried else []
        except (AttributeError, LowRankError):  # a torch without the list, or a network that it cannot capture
            return [sizes for sizes in tried if {*sizes.values()} <= {17.0, 65.0, 0.5, 4.0}]
        found: dict[str, list[dict[str, float]]] = {}
        for sizes in tried:
            args, kwargs = self.call.on_meta().sized(self.axes, sizes).arguments
            values = {"L": {**_bound(self.network, args, kwargs), **kwargs}, "math": math}
            broken = [guard for guard in guards if not _holds(guard, values)]
            if not any(guard.endswith("!= 1") for guard in broken):
                for guard in broken:
                    found.setdefault(guard, []).append(sizes)
        first = [sizes for places in found.values() for sizes in places[:3]]
        return [sizes for place, sizes in enumerate(first) if sizes not in first[:place]]

    def is_in_float(self, node: str) -> bool:
        """Whether a node of a graph, named by its layer, belongs to a layer that int8 leaves in float."""
        return any(node.startswith((f"{layer}/", f"{layer}.")) for layer in self.in_float)

    def trained_range(self, node: str) -> tuple[float, float] | None:
        """The range that training found for the input of the layer to which a node of a graph belongs."""
        found = (ends for layer, ends in self.ranges.items() if node.startswith((f"{layer}/", f"{layer}.")))
        return next(found, None)

    def positional(self) -> nn.Module:
        """The network as a module that takes its tensors in the order of their names and gives a tuple."""
        return _Positional(self.network, self.call).eval()

    def _shapes(self, network: nn.Module) -> Any:
        """The free axes in the form of the arguments, by the names of the forward's parameters."""
        free = iter([dict.fromkeys(self.axes[name], torch.export.Dim.DYNAMIC) for name in self.call.names])
        specs = [next(free) if isinstance(leaf, Tensor) else None for leaf in self.call.leaves]
        args, kwargs = tree_unflatten(specs, self.call.structure)
        return _bound(network, args, kwargs)


def _holds(guard: str, values: dict[str, Any]) -> bool:
    """Whether a comparison that torch wrote, such as "L['x'].size()[0] <= 16", holds for these inputs."""
    try:
        return bool(eval(guard, values))
    except Exception:  # a comparison of anything else
        return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the graph that torch.export prints where it cannot go on; the error says why."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


class _Positional(nn.Module):
    def __init__(self, network: nn.Module, call: Call) -> None:
        super().__init__()
        self.network, self.call = network, call

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        named = dict(zip(self.call.names, tensors, strict=True))
        result = plain_outputs(self.call.replaced(named).run(self.network))
        return tuple(result.values()) if isinstance(result, dict) else result


def _plain(network: nn.Module, call: Call) -> nn.Module:
    """The network behind the signature of its forward, its result in containers that torch alone can read."""
    with torch.no_grad(), unchanged(network):
        result = call.copied().run(network)
    if (isinstance(result, Tensor) or is_flat(result)) and not _is_hidden(network):
        return network
    return _behind(network, inspect.signature(network.forward), plain_outputs)


def _is_hidden(network: nn.Module) -> bool:
    """Whether a part has a name that torch's graphs use themselves: they would not find one called `meta`."""
    taken = dir(torch.fx.GraphModule({}, torch.fx.Graph()))
    return not {*network._modules, *network._parameters, *network._buffers}.isdisjoint(taken)


def _with_signature(network: nn.Module, kwargs: Mapping[str, Any]) -> nn.Module:
    """A network that takes any keyword, behind a signature that names these: torch.export reads no `**named`."""
    known = inspect.signature(network.forward)
    given = [one for one in known.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(given) == len(known.parameters) or not kwargs:
        return network
    names = [name for name in kwargs if name not in known.parameters]
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    return _behind(network, inspect.Signature([*given, *named]), lambda result: result)


def _behind(network: nn.Module, signature: inspect.Signature, finish: Callable[[Any], Any]) -> nn.Module:
    """A network whose forward has this signature, which torch.export reads, and whose results are finished so."""
    made = nn.Module()
    made.network = network

    def forward(*args: Any, **kwargs: Any) -> Any:
        return finish(network(*args, **kwargs))

    forward.__signature__ = signature  # type: ignore[attr-defined]
    made.forward = forward
    return made.eval()


def free_axes(call: Call, dynamic: Sequence[str] | Mapping[str, Mapping[int, str]]) -> Axes:
    """The free axes of every input: by words ("batch", "height", "width"), or for each input by number."""
    tensors = call.tensors
    if isinstance(dynamic, Mapping):
        if unknown := [name for name in dynamic if name not in tensors]:
            raise LowRankError(f"dynamic names {unknown[0]!r}, but the inputs are {', '.join(tensors)}.")
        wrong = [name for name, axes in dynamic.items() if any(not 0 <= a < tensors[name].dim() for a in axes)]
        if wrong:
            raise LowRankError(f"dynamic names an axis that {wrong[0]} lacks.")
        return {name: dict(dynamic.get(name, {})) for name in tensors}
    words = (dynamic,) if isinstance(dynamic, str) else tuple(dynamic)
    if unknown := [word for word in words if word not in FREE]:
        raise LowRankError(f"an axis can be {', '.join(FREE)}, not {unknown[0]!r}.")
    batch = next((len(tensor) for tensor in tensors.values() if tensor.dim()), 0)
    return {name: _axes_of(tensor, words, batch) for name, tensor in tensors.items()}


def _axes_of(tensor: Tensor, words: Sequence[str], batch: int) -> dict[int, str]:
    """Of an input: the first axis where it is as long as the batch, and the last ones of images."""
    found = {0: "batch"} if "batch" in words and tensor.dim() and len(tensor) == batch else {}
    inner = enumerate(_AXES.get(tensor.dim(), ()), start=2) if tensor.is_floating_point() else ()
    return found | {axis: word for axis, word in inner if word in words}


def _input_names(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """One positional tensor is an image; others have the names of the forward's parameters."""
    if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
        yield "image"
        return
    for path, leaf in tree_flatten_with_path({**_bound(network, args, {}), **kwargs})[0]:
        if isinstance(leaf, Tensor):
            yield "_".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _bound(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the forward's parameters."""
    try:
        return dict(inspect.signature(network.forward).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError) as error:
        raise LowRankError(f"the network is not called with these inputs: {first_line(error)}.") from error


# Half precision for engines that compute in the precision of the graph they are given.

Precision = Literal["fp32", "fp16"]
_BY_THE_ENGINE = (".xml", ".param", ".mnn", ".tflite")
"""Engines that lower a float32 graph to half precision themselves."""


class InSingle(nn.Module):
    """A layer that computes in float32 within a network in half precision."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float()).to(x.dtype)


class InHalf(nn.Module):
    """A network that computes in half precision, between inputs and outputs in float32.

    The layers that `in_single` names compute in float32.
    """

    def __init__(self, network: nn.Module, in_single: Callable[[nn.Module], bool] = lambda _: False) -> None:
        super().__init__()
        whole = copy.deepcopy(network).half()
        single = {part: InSingle(part) for part in whole.modules() if in_single(part)}
        self.network = copy_with(whole, single) if single else whole
        note(self, name=name_of(network))  # refusals speak of the user's network

    def forward(self, *tensors: Tensor) -> Any:
        return _cast(self.network(*_cast(tensors, torch.float32, torch.float16)), torch.float16, torch.float32)


def at_precision(request: ExportRequest, suffix: str, precision: str) -> ExportRequest:
    """The same request for a file in another precision."""
    if precision not in get_args(Precision):
        raise LowRankError(f"the precision is fp32 or fp16, not {precision!r}; lr.quantize (--int8) writes int8.")
    if precision == "fp32":
        return request
    if dtype_of(request.network) != torch.float32:
        raise LowRankError(f"fp16 is for networks in float32, and this one is in {dtype_of(request.network)}.")
    if request.call.arguments[1]:
        raise LowRankError("fp16 is for networks whose inputs go by position: call model.half() and export that.")
    if suffix in _BY_THE_ENGINE:
        return replace(request, precision="fp16")

    def in_single(part: nn.Module) -> bool:
        if suffix != ".onnx":
            return False
        # A file with strips is for the CPU, where ONNX Runtime multiplies matrices much faster in float32.
        return _has_groups(part) or (request.strips and type(part) is nn.Linear)

    # The groups of composites are taken apart first: a graph with casts in it is not captured again.
    network = InHalf(groups_apart(request.network), in_single).eval()
    return replace(request, network=network, precision="fp16")


def _has_groups(part: nn.Module) -> bool:
    """Whether a layer has groups of channels: on Arm ONNX Runtime 1.31 computes these wrongly in half precision.

    It computes a conv right that has as many groups as channels, before and after.
    """
    if not isinstance(part, nn.Conv2d | CompositeConv2d):
        return False
    return part.groups > 1 and not part.groups == part.in_channels == part.out_channels


def _cast(values: Any, before: torch.dtype, after: torch.dtype) -> Any:
    return mapped(lambda x: x.to(after) if isinstance(x, Tensor) and x.dtype == before else x, values)
