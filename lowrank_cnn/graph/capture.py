"""Capture a network once, as a graph of module and function calls that every transform reads and rewrites.

The capture is a `torch.fx` trace in which torch's layers, ours, and modules with hooks stay whole. `torch.export`
would turn modules into operators of one input size, but `merge` replaces modules in the user's class.

A graph is valid for the kind of call that it was captured from, and `NetworkGraph.calls` says for which. A plain
trace holds for inputs of every size and dtype, because a question about these fails in it. A test such as
`mask is None` does not fail. With an example a network of several inputs is therefore captured for calls with as
many tensors, and without one only if its graph is the same whichever optional inputs are given. A forward that
looks at sizes or dtypes is traced again with those of the example, and the graph holds for these alone. A forward
that looks at values is not captured: `capture` raises `CaptureError` with the reason.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import partialmethod
from inspect import Parameter, signature
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.fx.proxy import TraceError
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from lowrank_cnn.core.compare import copied, tensors_of, unchanged
from lowrank_cnn.core.errors import first_line
from lowrank_cnn.core.modules import has_hooks, is_part_of, is_plain

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SIZE_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda", "layout", "requires_grad", "itemsize", "nbytes"}
_SIZE_METHODS = {
    "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "element_size",
}  # fmt: skip
_RESHAPES = {"reshape", "view", "unsqueeze", torch.reshape, torch.unsqueeze, operator.getitem}
_MOST_KINDS = 16
"""The most kinds of call that are traced and compared: four optional inputs, each given or not."""


class CaptureError(Exception):
    """A network's forward cannot be captured; the message gives the reason."""


InputKind = tuple[tuple[int, ...], torch.dtype, str]


def kind_of(x: Tensor) -> InputKind:
    """The properties of an input that a forward can ask for without its values: size, dtype, device type."""
    return tuple(x.shape), x.dtype, x.device.type


@dataclass(frozen=True)
class NetworkGraph:
    """A captured network.

    `calls` are the inputs, all tensors, of the calls that the graph is valid for; None if it is for all calls. An
    input is described by `kind_of`, or by None if its size and dtype decide nothing. `keeps` names the attributes
    that the forward sets (`self.last = y`) and the graph does not.
    """

    root: nn.Module
    graph: fx.Graph
    calls: tuple[InputKind | None, ...] | None = None
    keeps: tuple[str, ...] = ()

    def complete(self) -> NetworkGraph:
        """This graph, if it can run in the network's place; `CaptureError` if it would leave something out."""
        if self.keeps:
            raise CaptureError(f"its forward sets attributes ({', '.join(self.keeps)}), which a graph does not")
        return self

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls; None if it calls a function."""
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def constant(self, node: fx.Node) -> Tensor | None:
        """A parameter of the network that a node reads or reshapes; None for all other nodes."""
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self.root)
            return value if isinstance(value, nn.Parameter) else None
        reshapes = node.target in _RESHAPES and node.all_input_nodes == list(node.args[:1])
        value = self.constant(node.all_input_nodes[0]) if reshapes else None
        if value is None:
            return None
        run: Any = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
        return run(value, *node.args[1:], **node.kwargs)

    def computes_like(self, other: NetworkGraph) -> bool:
        """Whether two graphs make the same calls, and read the same values of tensors of their networks."""
        if _calls_of(self.graph) != _calls_of(other.graph):
            return False
        ours, theirs = (
            [operator.attrgetter(str(node.target))(one.root) for node in one.graph.nodes if node.op == "get_attr"]
            for one in (self, other)
        )
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    def called(self) -> set[str]:
        """The names of all modules that are called."""
        return {str(node.target) for node in self.graph.nodes if node.op == "call_module"}

    def called_once(self) -> dict[str, fx.Node]:
        """The calls of modules that a transform may replace, by name.

        Left out are modules that are called several times, that are part of a module kept whole, or whose tensors
        the forward reads directly: replacing them would miss a use, or change another one.
        """
        called = [node for node in self.graph.nodes if node.op == "call_module"]
        modules = {node: self.root.get_submodule(str(node.target)) for node in called}
        times = Counter(modules.values())
        inside = {part for module in times for child in module.children() for part in child.modules()}
        read = {str(node.target).rpartition(".")[0] for node in self.graph.nodes if node.op == "get_attr"}
        once = {str(n.target): n for n in called if times[modules[n]] == 1 and modules[n] not in inside}
        return {name: node for name, node in once.items() if not any(is_part_of(own, name) for own in read)}


def capture(root: nn.Module, *example: Any) -> NetworkGraph:
    """Capture a network for calls of the example's kind; without an example, for every call.

    The trace may add tensors that the forward creates to `root`: pass a copy of the user's network.
    """
    if not example:
        first, *others = captures(root)
        if any(_calls_of(other.graph) != _calls_of(first.graph) for other in others):
            raise CaptureError("its forward depends on its optional inputs")
        return first
    _check_hooks(root)
    try:
        optional = _optional_inputs(root)
        given = list(signature(type(root).forward).parameters)[1 : len(example) + 1]
        more = len(example) > len(given)  # than there are names: these are in `*args`
        left_out = {n: v for n, v in optional.items() if n.strip("*") not in given and not (more and v == ())}
        return _Tracer(left_out).captured(root, (None,) * len(example) if optional else None)
    except Exception:  # a forward may fail on symbolic values in any way
        pass
    try:
        with torch.no_grad():
            return _SizedTracer(root, copied(*example)).captured(root, tuple(map(kind_of, example)))
    except Exception as error:
        raise CaptureError(f"its forward cannot be traced ({first_line(error)})") from error


def captures(root: nn.Module) -> list[NetworkGraph]:
    """A graph for each kind of call: first with all inputs, then with some of the optional ones left out."""
    _check_hooks(root)
    try:
        graphs = [_Tracer().captured(root)]
        optional = _optional_inputs(root)
        values = [[(), (v,), (not v,)] if isinstance(v, bool) else [(), (v,)] for v in optional.values()]
        kinds = list(product(*values)) if len(values) < _MOST_KINDS else []
        if not 1 <= len(kinds) <= _MOST_KINDS:
            raise CaptureError(f"it has {len(optional)} optional inputs")
        for kind in kinds[1:]:
            left_out = {name: value[0] for name, value in zip(optional, kind, strict=True) if value}
            try:
                graphs.append(_Tracer(left_out).captured(root))
            except (AttributeError, TypeError, ValueError, AssertionError) as error:
                if isinstance(error, TraceError) or "Proxy" in str(error):
                    raise
                continue  # the network refuses such a call, too
    except Exception as error:  # a forward may fail on symbolic values in any way
        raise CaptureError(f"its forward cannot be traced ({first_line(error)})") from error
    return graphs


def _optional_inputs(root: nn.Module) -> dict[str, Any]:
    """The inputs that a call may leave out or give as None, all but the first, and their default values."""
    _, *inputs = signature(type(root).forward).parameters.values()
    variable = {Parameter.VAR_POSITIONAL: ("*", ()), Parameter.VAR_KEYWORD: ("**", {})}
    found = {}
    for place, given in enumerate(inputs):
        mark, empty = variable.get(given.kind, ("", None))
        if place or mark:
            found[f"{mark}{given.name}"] = empty if given.default is Parameter.empty else given.default
    return found


def _calls_of(graph: fx.Graph) -> list[tuple[str, ...]]:
    """All that a graph computes, to compare it with others of the same network."""
    nodes = (node for node in graph.nodes if node.op != "placeholder")
    return [tuple(map(str, (node.op, node.target, node.args, node.kwargs))) for node in nodes]


def _check_hooks(root: nn.Module) -> None:
    if has_hooks(root) or _has_any_global_hook():
        raise CaptureError("hooks are registered on the network as a whole")


def layer_kind(module: nn.Module | None) -> str | None:
    """The kind of a layer; None for any other module.

    The kinds are "conv", "transposed conv", "linear", "composite", "chain" and "bands", which is a `FusedBands`. A
    module with hooks or parametrized weights is none of these.
    """
    if module is None or has_hooks(module) or "forward" in vars(module) or is_parametrized(module):
        return None
    if hasattr(module, "weights") and hasattr(module, "group_padding"):
        return "composite"
    if hasattr(module, "bands") and hasattr(module, "in_one_pass"):
        return "bands"
    if isinstance(module, nn.Sequential):
        parts = list(module)
        plain = hasattr(module, "scheme") and type(module).forward is nn.Sequential.forward and parts
        return "chain" if plain and all(layer_kind(part) in ("conv", "composite") for part in parts) else None
    kinds = {"conv": CONVS, "transposed conv": TRANSPOSED, "linear": (nn.Linear,)}
    return next((name for name, own in kinds.items() if any(is_plain(module, kind) for kind in own)), None)


class _Proxy(fx.Proxy):
    """Records `y += x` as a change in place; fx alone would record a sum that does not change y."""

    def _change(self, change: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", change, (self, other), {})


AUGMENTED = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
)  # fmt: skip
for _operator in AUGMENTED:
    setattr(_Proxy, f"__{_operator.__name__}__", partialmethod(_Proxy._change, _operator))


class _Tracer(fx.Tracer):
    """Keeps layers whole, and modules with hooks, which a trace would lose, or without parts."""

    proxy_buffer_attributes = True  # so that the graph shows which buffers the forward reads

    def __init__(self, left_out: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__()
        self.left_out = left_out

    def captured(self, root: nn.Module, calls: tuple[InputKind | None, ...] | None = None) -> NetworkGraph:
        """Trace a network and leave it as it was, but for the tensors that its forward creates."""
        before = _attributes(root)
        with unchanged(root):
            graph = self.trace(root)
            keeps = tuple(name for name, held in _attributes(root).items() if held != before.get(name))
            constants = {name: value for name, value in vars(root).items() if name.startswith("_tensor_")}
        vars(root).update(constants)
        for node in graph.nodes:
            node.type = None  # fx cannot write annotations, which are strings here, to a file
            module = root.get_submodule(str(node.target)) if node.op == "call_module" and node.kwargs else None
            if module is not None and not has_hooks(module):  # a hook sees how its layer is called
                bound = signature(module.forward).bind(*node.args, **node.kwargs)  # `conv(input=x)` by position
                node.args, node.kwargs = bound.args, bound.kwargs
        graph.lint()
        return NetworkGraph(root, graph, calls, keeps)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Inputs that a call leaves out have the values given for them."""
        run, (root, *inputs) = super().create_args_for_root(root_fn, is_module, concrete_args)
        return run, [root, *(self.left_out.get(str(value.node.target), value) for value in inputs)]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        """A dictionary that is a dataclass, such as the outputs of Hugging Face models, keeps its class."""
        if isinstance(a, dict) and is_dataclass(a):
            given = {name: self.create_arg(value) for name, value in a.items()}
            return self.create_node("call_function", type(a), (), given)
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = layer_kind(m) in ("composite", "chain")
        whole = ours or has_hooks(m) or not m._modules or "forward" in vars(m)
        return whole or super().is_leaf_module(m, module_qualified_name)


def _attributes(root: nn.Module) -> dict[str, list[int]]:
    """The values of the attributes of a network and its parts, by identity, without constants that fx adds."""
    return {
        f"{part}.{name}" if part else name: [id(value) for value in tree_leaves(held)]
        for part, module in root.named_modules()
        for name, held in vars(module).items()
        if not name.startswith("_")
    }


class _SizedProxy(_Proxy):
    """A symbolic value that also has its value on the example, and answers questions about its size."""

    value: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name) if name in _SIZE_ATTRIBUTES else super().__getattr__(name)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return iter([operator.getitem(self, place) for place in range(len(self.value))])  # type: ignore[call-overload]


class _SizedTracer(_Tracer):
    """Runs the network on the example while it traces, so that sizes are numbers; values stay symbolic."""

    def __init__(self, root: nn.Module, example: tuple[Any, ...]) -> None:
        super().__init__()
        self.example, self.computing = example, False
        self.interpreter = fx.Interpreter(root, graph=fx.Graph())

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _SizedProxy(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Call the forward with only the example's inputs: other options keep their defaults."""
        inputs = [self.create_proxy("placeholder", f"input_{n}", (), {}) for n in range(len(self.example))]
        return root_fn, [self.root, *inputs]

    # Calls inside a leaf run on real values. fx intercepts them too, but they are not part of the trace.
    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self.computing else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        positional, named = (
            map_aggregate(part, lambda given: given.value if isinstance(given, _SizedProxy) else given)
            for part in (args, kwargs)
        )
        if kind == "call_method" and target in _SIZE_METHODS:
            return getattr(positional[0], target)(*positional[1:], **named)
        made = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        self.computing = True
        try:
            if kind == "placeholder":
                value = self.example[int(target.removeprefix("input_"))]
            else:
                value = getattr(self.interpreter, kind)(target, positional, named)
        finally:
            self.computing = False
        if kind.startswith("call") and not tensors_of(value):
            raise CaptureError(f"{getattr(target, '__name__', target)} gives Python a value that depends on data")
        assert isinstance(made, _SizedProxy)
        made.value = value
        return made
