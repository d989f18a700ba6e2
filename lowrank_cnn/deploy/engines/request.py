"""The request that an engine writes: a network, an example call with names for its tensors, and free axes.

A network may take several inputs, by position or by keyword, and give a tensor, a tuple, a dictionary or a
dataclass (as Hugging Face's do). Files hold only named tensors: `Call` names the inputs, `named_tensors` the
outputs. `request_for` makes a request from a network and the options of `export`.
"""

from __future__ import annotations

import copy
import inspect
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_structure, tree_unflatten

from lowrank_cnn.core.compare import is_finite, mapped, random_like, unchanged
from lowrank_cnn.core.errors import LowRankError, check_choice, explained
from lowrank_cnn.core.notes import note
from lowrank_cnn.core.text import counted
from lowrank_cnn.deploy.blocks import groups_apart, in_layers
from lowrank_cnn.deploy.engines.runner import Engine, quiet
from lowrank_cnn.deploy.metadata import metadata_of
from lowrank_cnn.deploy.optimize import Optimized
from lowrank_cnn.graph.examples import arguments_of
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.models.build import name_of
from lowrank_cnn.models.network_file import Stored, dtype_of
from lowrank_cnn.train.int8 import Ranges
from lowrank_cnn.train.trained import Trained, trained_of

_AXES = {3: ("length",), 4: ("height", "width"), 5: ("depth", "height", "width")}
"""Names of the axes after batch and channels, by the number of dimensions."""
_FREE = ("batch", "length", "depth", "height", "width")
_BATCHES = (1, 3, *(n + more for n in (4, 8, 16, 32, 64, 128, 256, 512, 1024) for more in (0, 1)))
_SCALES = (0.75, 1.25, 0.5, 1.5, 2.0, 0.25, 3.0, 4.0, 8.0, 32.0)
"""Lengths of free axes at which a forward may take another path: batches, and others relative to the example."""
Axes = dict[str, dict[int, str]]
"""For each input, its axes of any length and their names."""
Layout = Literal["nchw", "nhwc"]
"""Axes of a batch of uint8 images: [N, C, H, W] or [N, H, W, C]."""
Precision = Literal["fp32", "fp16"]


def named_tensors(result: Any) -> dict[str, Tensor]:
    """The tensors of a result by name: keys, fields and indices, joined by underscores; None is left out.

    >>> list(named_tensors({"logits": torch.ones(1), "maps": (torch.ones(2), torch.ones(2))}))
    ['logits', 'maps_0', 'maps_1']
    """
    found: dict[str, Tensor] = {}
    for path, value in _leaves(result):
        key = "_".join(map(str, path)) or "output"
        if not isinstance(value, Tensor):
            told = f"the network returns a {type(value).__name__} ({key}), but a file holds only tensors"
            raise LowRankError(f"{told}: export a module without it.")
        found[key if key not in found else f"{key}_{len(found)}"] = value
    if not found:
        raise LowRankError("the network gives no tensor.")
    return found


def _leaves(value: Any, *path: object) -> Iterator[tuple[tuple[object, ...], Any]]:
    if isinstance(value, Mapping):
        parts = value
    elif is_dataclass(value):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
    elif hasattr(value, "_asdict"):  # a named tuple
        parts = value._asdict()
    elif isinstance(value, list | tuple):
        parts = {place if path else f"output_{place}": part for place, part in enumerate(value)}
    else:
        parts = {}
        if value is not None:
            yield path, value
    for key, part in parts.items():
        yield from _leaves(part, *path, key)


def _plain_outputs(result: Any) -> Any:
    """A result as a tensor, a tuple of tensors (of a tuple or list), or a dictionary of tensors by name."""
    if isinstance(result, Tensor):
        return result
    found = named_tensors(result)
    return tuple(found.values()) if isinstance(result, list | tuple) and not hasattr(result, "_fields") else found


@dataclass(frozen=True)
class Call:
    """The inputs of a network: every tensor among them has a name, anything else is a constant."""

    leaves: tuple[Any, ...]
    structure: TreeSpec
    names: tuple[str, ...]

    @classmethod
    def of(cls, network: nn.Module, example: Any, names: Sequence[str] | None = None) -> Call:
        """The call of a tensor, a tuple (whose last entry may be a dictionary), or a dictionary of keywords."""
        args, kwargs = arguments_of(example)
        order = [*_bound(network, args, kwargs), *kwargs]  # the forward's order, which torch.export keeps
        kwargs = {name: kwargs[name] for name in dict.fromkeys(order) if name in kwargs}
        leaves, structure = tree_flatten((args, kwargs))
        found = list(_input_names(network, args, kwargs))
        if not found:
            raise LowRankError(f"an example input must contain tensors, not only {type(example).__name__}.")
        if names is not None and not len(names) == len(set(names)) == len(found):
            told = counted(len(found), "input")
            raise LowRankError(f"the network takes {told}: give as many different input_names.")
        return cls(tuple(leaves), structure, tuple(names or found))

    @property
    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.names, (leaf for leaf in self.leaves if isinstance(leaf, Tensor)), strict=True))

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_unflatten(list(self.leaves), self.structure)  # type: ignore[return-value]

    def replaced(self, tensors: Mapping[str, Tensor]) -> Call:
        rest = iter([tensors[name] for name in self.names])
        leaves = (next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)
        return replace(self, leaves=tuple(leaves))

    def copied(self) -> Call:
        """The same call with copies of its tensors, for a forward that may change them."""
        return self.replaced({name: tensor.detach().clone() for name, tensor in self.tensors.items()})

    def run(self, network: Any) -> Any:
        args, kwargs = self.arguments
        return network(*args, **kwargs)

    def sized(self, axes: Axes, sizes: Mapping[str, float], *, seed: int | None = None) -> Call:
        """The call with free axes of other lengths (factors, but for `batch`); with a seed, of random numbers."""
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
    """The content of a file. `network` is in evaluation, with torch's own layers, and runs the call."""

    network: nn.Module
    call: Call
    outputs: tuple[str, ...]
    axes: Axes
    opset: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    calibration: Sequence[tuple[Tensor, ...]] = ()
    in_float: tuple[str, ...] = ()
    """Layers that int8 leaves in float."""
    ranges: Ranges = field(default_factory=dict)
    """For int8: the input ranges of layers that training found; calibration sets all others."""
    strips: bool = False
    """For .onnx: 1x3 and 3x1 convs by the operator of `lowrank_strips`."""
    captured: list[torch.export.ExportedProgram] = field(default_factory=list)
    """torch.export programs of this network, and of the forms that writers make of it."""

    @property
    def name(self) -> str:
        return name_of(self.network)

    @cached_property
    def traced_call(self) -> Call:
        """The example with length two on free axes of length one: tracers treat one as a constant."""
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
        free = f" with free {' and '.join(self.free)}" if self.free else ""
        with explained(f"torch.export cannot trace {self.name}{free}"):
            network = _capturable(self.network, self.call)
            dims = iter([dict.fromkeys(self.axes[name], torch.export.Dim.DYNAMIC) for name in self.call.names])
            specs = [next(dims) if isinstance(leaf, Tensor) else None for leaf in self.call.leaves]
            shapes = _bound(network, *tree_unflatten(specs, self.call.structure))
            with quiet(), redirect_stderr(io.StringIO()):  # torch prints the graph if it refuses a part of it
                program = torch.export.export(network, args, kwargs, dynamic_shapes=shapes)
        for module in program.graph_module.modules():  # source lines with paths, which the file must not contain
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                node.meta.pop("stack_trace", None)
        self.captured.append(program)
        return program

    @property
    def other_paths(self) -> list[dict[str, float]]:
        """Lengths, as in `tried_sizes`, at which the forward may take another path than for the example.

        torch.export lists the comparisons of sizes on which a capture branched; this returns lengths that violate
        one. Comparisons with 1 are torch's own, and a program (.pt2) runs only where they hold. Without such a
        list, it returns a few lengths below and above the example's.
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
        on_meta = self.call.replaced({name: tensor.to("meta") for name, tensor in self.call.tensors.items()})
        for sizes in tried:
            args, kwargs = on_meta.sized(self.axes, sizes).arguments
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

    def one_image(self, engine: str) -> Call:
        """The example reduced to one image, for an engine whose files have a fixed size."""
        for axis, word in (pair for free in self.axes.values() for pair in free.items()):
            if axis or word != "batch":
                raise LowRankError(f"a file for {engine} has a fixed image size: leave {word} out of dynamic.")
        return self.call.replaced({name: tensor[:1] for name, tensor in self.call.tensors.items()})

    def positional(self) -> nn.Module:
        """The network as a module that takes its tensors in the order of their names and gives a tuple."""
        return _Positional(self.network, self.call).eval()


def _holds(guard: str, values: dict[str, Any]) -> bool:
    """Whether a comparison written by torch, such as "L['x'].size()[0] <= 16", holds for these inputs."""
    try:
        return bool(eval(guard, values))
    except Exception:  # a comparison of anything else
        return True


class _Positional(nn.Module):
    def __init__(self, network: nn.Module, call: Call) -> None:
        super().__init__()
        self.network, self.call = network, call

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        named = dict(zip(self.call.names, tensors, strict=True))
        result = _plain_outputs(self.call.replaced(named).run(self.network))
        return tuple(result.values()) if isinstance(result, dict) else result


def _capturable(network: nn.Module, call: Call) -> nn.Module:
    """The network, or a module around it if torch.export cannot read its result, its parts or its signature."""
    with torch.no_grad(), unchanged(network):
        result = call.copied().run(network)
    # A part cannot have a name that torch's graphs use themselves, such as `meta`.
    taken = dir(torch.fx.GraphModule({}, torch.fx.Graph()))
    readable = {*network._modules, *network._parameters, *network._buffers}.isdisjoint(taken)
    # It does not support `**named`, so the signature names the keywords of this call.
    signature, keywords = inspect.signature(network.forward), call.arguments[1]
    known = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    open_ended = bool(keywords) and len(known) < len(signature.parameters)
    plain = tree_structure(result) == tree_structure(_plain_outputs(result))
    if plain and readable and not open_ended:
        return network
    if open_ended:
        names = [name for name in keywords if name not in signature.parameters]
        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        signature = inspect.Signature([*known, *more])
    made = nn.Module()
    made.network = network

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _plain_outputs(network(*args, **kwargs))

    forward.__signature__ = signature  # type: ignore[attr-defined]
    made.forward = forward
    return made.eval()


def free_axes(call: Call, dynamic: Sequence[str] | Mapping[str, Mapping[int, str]]) -> Axes:
    """The free axes of every input: by words ("batch", "height", "width"), or for each input by number."""
    tensors = call.tensors
    if isinstance(dynamic, Mapping):
        if unknown := [name for name in dynamic if name not in tensors]:
            raise LowRankError(f"dynamic names {unknown[0]!r}, but the inputs are {', '.join(tensors)}.")
        for name, axes in dynamic.items():
            if not all(0 <= axis < tensors[name].dim() for axis in axes):
                raise LowRankError(f"dynamic names an axis that {name} lacks.")
        return {name: dict(dynamic.get(name, {})) for name in tensors}
    words = (dynamic,) if isinstance(dynamic, str) else tuple(dynamic)
    if unknown := [word for word in words if word not in _FREE]:
        raise LowRankError(f"an axis can be {', '.join(_FREE)}, not {unknown[0]!r}.")
    found: Axes = {}
    batch = next((len(tensor) for tensor in tensors.values() if tensor.dim()), 0)
    for name, tensor in tensors.items():
        inner = enumerate(_AXES.get(tensor.dim(), ()), start=2) if tensor.is_floating_point() else ()
        found[name] = {0: "batch"} if "batch" in words and tensor.dim() and len(tensor) == batch else {}
        found[name] |= {axis: word for axis, word in inner if word in words}
    return found


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
    with explained("the network cannot be called with these inputs"):
        return dict(inspect.signature(network.forward).bind_partial(*args, **kwargs).arguments)


class InSingle(nn.Module):
    """A layer that computes in float32 within a network in half precision."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float()).to(x.dtype)


class InHalf(nn.Module):
    """A network in half precision between inputs and outputs in float32, as are layers that `in_single` names."""

    def __init__(self, network: nn.Module, in_single: Callable[[nn.Module], bool] = lambda _: False) -> None:
        super().__init__()
        whole = copy.deepcopy(network).half()
        single = {part: InSingle(part) for part in whole.modules() if in_single(part)}
        self.network = copy_with(whole, single) if single else whole
        note(self, name=name_of(network))  # error messages name the user's network

    def forward(self, *tensors: Tensor) -> Any:
        return _cast(self.network(*_cast(tensors, torch.float32, torch.float16)), torch.float16, torch.float32)


def at_precision(request: ExportRequest, engine: Engine, precision: str) -> ExportRequest:
    """The same request for a file in another precision."""
    check_choice("precision", precision, (*get_args(Precision), "int8"))
    if precision == "fp32":
        return request
    if dtype_of(request.network) != torch.float32:
        raise LowRankError(f"fp16 is for networks in float32, and this one is in {dtype_of(request.network)}.")
    if request.call.arguments[1]:
        raise LowRankError("fp16 is for networks with positional inputs: call model.half() and export that.")
    network = request.network
    if not engine.lowers:
        # Composites are split into their groups first: a graph with casts cannot be captured again.
        network = InHalf(groups_apart(network), lambda part: engine.in_single(part, request.strips)).eval()
    return replace(request, network=network, precision="fp16")


def _cast(values: Any, before: torch.dtype, after: torch.dtype) -> Any:
    return mapped(lambda x: x.to(after) if isinstance(x, Tensor) and x.dtype == before else x, values)


class PreparedNetwork(nn.Module):
    """A network with preprocessing, for uint8 images; whitening needs whole ones, which the graph then crops."""

    def __init__(self, trained: Trained, layout: str) -> None:
        super().__init__()
        self.network, self.prepare, self.layout = trained.network, trained.preprocess, layout
        self.window = trained.input_size[1:]
        note(self, name=name_of(trained.network))  # error messages name the user's network

    def forward(self, image: Tensor) -> Any:
        pixels = image.permute(0, 3, 1, 2) if self.layout == "nhwc" else image
        prepared = self.prepare(pixels)
        top, left = ((prepared.shape[2 + axis] - self.window[axis]) // 2 for axis in (0, 1))
        seen = prepared[:, :, top : top + self.window[0], left : left + self.window[1]]
        like = next(iter(self.network.parameters()), seen)
        return self.network(seen.to(like.dtype))


def request_for(
    stored: Stored,
    example: Any = None,
    dynamic: Any = ("batch",),
    names: Mapping[str, Sequence[str] | None] = MappingProxyType({}),
    preprocess: bool | Layout = False,
) -> tuple[nn.Module, ExportRequest]:
    """The network that the file is compared with, and the request for its writer, both on the CPU."""
    network = copy_with(stored.network).eval().cpu()
    if isinstance(network, Optimized):
        network.forget()  # without compiled code, which would be compiled again for every size that is compared
    layout: Layout | None = "nchw" if preprocess is True else preprocess or None
    if layout:
        network, example = _prepared(replace(stored, network=network), layout, example)
    elif example is None:
        if stored.input_size is None:
            raise LowRankError("give the size of the images (channels, height, width), or example_input.")
        drawn = torch.randn(2, *stored.input_size, generator=torch.Generator().manual_seed(2))
        example = drawn.to(dtype_of(stored.network))
    call = Call.of(network, example, names.get("inputs"))
    call = call.replaced({name: tensor.detach().cpu() for name, tensor in call.tensors.items()})
    found = checked_outputs(network, call)
    outputs = tuple(f"output_{name}" if name in call.names else name for name in found)
    if (asked := names.get("outputs")) is not None:
        if len(asked) != len(found) or len({*asked, *call.names}) != len(asked) + len(call.names):
            told = f"{counted(len(found), 'output')} ({', '.join(found)})"
            raise LowRankError(f"the network gives {told}: give as many different output_names.")
        outputs = tuple(asked)
    axes = free_axes(call, dynamic)
    results = dict(zip(outputs, found.values(), strict=True))
    metadata = metadata_of(stored, pixels=layout) | {
        "inputs": _described(call.tensors, axes),
        "outputs": _described(results, {name: {} for name in results}, fixed=not any(axes.values())),
    }
    return network, ExportRequest(in_layers(network).eval(), call, outputs, axes, metadata=metadata)


def _prepared(stored: Stored, layout: Layout, example: Any) -> tuple[nn.Module, Tensor]:
    """A trained network with preprocessing, and uint8 images of the size that it takes."""
    trained = trained_of(stored)
    if layout not in ("nchw", "nhwc"):
        raise LowRankError(f"preprocess is True, 'nchw' or 'nhwc', not {layout!r}.")
    if trained is None or example is not None:
        raise LowRankError(
            "preprocess needs a trained image network, which stores its preprocessing: give a run, or the result "
            "of load or fit, without example_input."
        )
    whole = trained.image if trained.preprocess.to_dict().keys() != {"mean", "std"} else trained.input_size
    drawn = torch.randint(0, 256, (2, *whole), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    network = PreparedNetwork(trained, layout).eval()
    return network, drawn.permute(0, 2, 3, 1).contiguous() if layout == "nhwc" else drawn


def _described(tensors: Mapping[str, Tensor], axes: Axes, *, fixed: bool = True) -> str:
    """Names, shapes and types for formats that store none; free axes have no length."""
    rows = []
    for name, tensor in tensors.items():
        shape = [axes[name].get(axis, size if fixed else None) for axis, size in enumerate(tensor.shape)]
        rows.append({"name": name, "shape": shape, "dtype": str(tensor.dtype).removeprefix("torch.")})
    return json.dumps(rows)


def shapes_of(call: Call) -> str:
    return ", ".join("x".join(map(str, tensor.shape)) for tensor in call.tensors.values())


def checked_outputs(network: nn.Module, call: Call) -> dict[str, Tensor]:
    """The outputs of a network for a call, by name. Refuse a network that fails or gives NaN."""
    failed = f"the network does not run on an input of {shapes_of(call)}"
    with explained(failed), torch.no_grad(), unchanged(network):
        found = named_tensors(call.copied().run(network))
    if not is_finite(list(found.values())):
        raise LowRankError("the network gives NaN or infinite values on random images: nothing was written.")
    return found
