"""Capture a network once, as a graph of module and function calls that every transform reads and rewrites.

The capture is a `torch.fx` trace in which torch's layers, ours, and modules with hooks stay whole. It keeps the
calls of modules: `merge` replaces modules in the user's class, and a fused block is a module under the name of its
layer. `torch.export` would turn modules into operators of one input size, from which modules would have to be
guessed.

A plain trace holds for inputs of every size, because no value and no size decides anything in it. A forward that
looks at sizes or at options (`output_hidden_states=None`) cannot be traced so. With an example it is traced again
with the example's sizes and the options' defaults, and `NetworkGraph.sizes` says that the graph holds for such
calls alone. A forward that looks at values is not captured: `capture` raises `CaptureError` with the reason.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.nn.utils.parametrize import is_parametrized

from lowrank_cnn.system.compare import copied, unchanged
from lowrank_cnn.system.errors import first_line

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SIZE_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda", "layout", "requires_grad", "itemsize", "nbytes"}
_SIZE_METHODS = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "is_floating_point",
    "is_complex",
    "element_size",
}


class CaptureError(Exception):
    """A network's forward cannot be captured; the message gives the reason."""


@dataclass(frozen=True)
class NetworkGraph:
    """A captured network. `sizes` are the input shapes that the graph is valid for; None if it is for all."""

    root: nn.Module
    graph: fx.Graph
    sizes: tuple[tuple[int, ...], ...] | None = None

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls; None if it calls a function."""
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def called_once(self) -> dict[str, fx.Node]:
        """The calls of modules that a transform may replace, by name.

        Left out are modules that are called several times, that are part of a module kept whole, or whose tensors
        the forward reads directly: replacing them would miss a use, or change another one.
        """
        calls = [node for node in self.graph.nodes if node.op == "call_module"]
        times = Counter(id(self.module(node)) for node in calls)
        inside = {id(part) for node in calls for part in list(self._parts(node))[1:]}
        read = {str(node.target).rpartition(".")[0] for node in self.graph.nodes if node.op == "get_attr"}
        return {
            str(node.target): node
            for node in calls
            if times[id(self.module(node))] == 1
            and id(self.module(node)) not in inside
            and not any(is_part_of(name, str(node.target)) for name in read)
        }

    def _parts(self, node: fx.Node) -> Iterator[nn.Module]:
        module = self.module(node)
        return iter(()) if module is None else module.modules()


def capture(root: nn.Module, *example: Any, by_example: bool = False) -> NetworkGraph:
    """Capture a network; with example inputs, a forward that branches on sizes is captured for their sizes.

    `by_example` captures it for these in any case, with options at their defaults. The trace may add tensors that
    the forward creates to `root`: pass a copy of the user's network.
    """
    if has_hooks(root) or _any_global_hook():
        raise CaptureError("hooks are registered on the network as a whole")
    reason = ""
    if not by_example:
        try:
            return NetworkGraph(root, _finished(_Tracer().trace(root)))
        except Exception as error:  # a forward may fail on symbolic values in any way
            reason = first_line(error)
    if example:
        try:
            with torch.no_grad(), unchanged(root):
                graph = _SizedTracer(root, copied(*example)).trace(root)
                constants = {name: value for name, value in vars(root).items() if name.startswith("_tensor_")}
            vars(root).update(constants)
            sizes = tuple(tuple(value.shape) for value in example if isinstance(value, Tensor))
            return NetworkGraph(root, _finished(graph), sizes)
        except Exception as error:
            reason = first_line(error)
    raise CaptureError(f"its forward cannot be traced ({reason})")


def is_part_of(name: str, parent: str) -> bool:
    """Whether a dotted name is that of a module or of one of its parts."""
    return name == parent or name.startswith(f"{parent}.")


def layer_kind(module: nn.Module | None) -> str | None:
    """The kind of a layer; None for any other module.

    The kinds are "conv", "transposed conv", "linear", "composite", "chain" and "own conv".

    A module with hooks or parametrized weights is none of these. An "own conv" is a subclass of a conv whose
    forward ends in the conv itself, for example after padding its input.
    """
    if module is None or has_hooks(module) or "forward" in vars(module) or is_parametrized(module):
        return None
    if hasattr(module, "weights") and hasattr(module, "group_padding"):
        return "composite"
    if isinstance(module, nn.Sequential):
        parts = list(module)
        plain = hasattr(module, "scheme") and type(module).forward is nn.Sequential.forward and parts
        return "chain" if plain and all(layer_kind(part) in ("conv", "composite") for part in parts) else None
    if any(is_plain(module, kind) for kind in CONVS):
        return "conv"
    if any(is_plain(module, kind) for kind in TRANSPOSED):
        return "transposed conv"
    if isinstance(module, CONVS):
        return "own conv" if _ends_in_conv(module) else None
    return "linear" if is_plain(module, nn.Linear) else None


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether a module computes what its kind does, and has no hooks."""
    return isinstance(module, kind) and computes_as(module, kind) and not has_hooks(module)


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module has every method of its kind that takes part in a call; a conv has more than a forward."""
    own, its = type(module), vars(module)
    return all(getattr(own, name, None) is getattr(kind, name, None) and name not in its for name in _COMPUTING)


_COMPUTING = ("forward", "_conv_forward", "_output_padding", "__call__", "_call_impl", "__getattr__")


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run when the module is called."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


_CONVOLVE = (torch.conv1d, torch.conv2d, torch.conv3d)


def _ends_in_conv(module: nn.Module) -> bool:
    """Whether a forward returns the result of one convolution with the module's own weight and bias."""
    try:
        graph = _Tracer().trace(module)
    except Exception:  # a forward may fail on symbolic values in any way
        return False
    (result,) = (node.args[0] for node in graph.nodes if node.op == "output")
    if not isinstance(result, fx.Node) or result.target not in _CONVOLVE or result.kwargs or len(result.args) < 3:
        return False
    weight, bias = result.args[1:3]
    reads = [node for node in graph.nodes if node.op == "get_attr"]
    named = isinstance(weight, fx.Node) and weight.target == "weight" and len(weight.users) == 1
    added = bias is None or (isinstance(bias, fx.Node) and bias.target == "bias" and len(bias.users) == 1)
    return named and added and len(reads) == (1 if bias is None else 2)


class _Proxy(fx.Proxy):
    """Records `y += x` as a change in place; fx alone would record a sum that does not change y."""


def _in_place(change: Any) -> Any:
    def method(self: fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", change, (self, other), {})

    return method


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    setattr(_Proxy, f"__{_name}__", _in_place(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    """Keeps layers whole, and modules with hooks, which a trace would lose, or without parts."""

    proxy_buffer_attributes = True  # so that the graph shows which buffers the forward reads

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        """A dictionary that is a dataclass, as the outputs of Hugging Face's networks are, keeps its class."""
        if isinstance(a, dict) and is_dataclass(a):
            given = {name: self.create_arg(value) for name, value in a.items()}
            return self.create_node("call_function", type(a), (), given)
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = layer_kind(m) in ("composite", "chain", "own conv")
        whole = ours or has_hooks(m) or not m._modules or "forward" in vars(m)
        return whole or super().is_leaf_module(m, module_qualified_name)


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
        self.example, self.network, self.computing = example, root, False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _SizedProxy(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Call the forward with the example's inputs alone: options that it leaves out keep their defaults."""
        inputs = [self.create_proxy("placeholder", f"input_{n}", (), {}) for n in range(len(self.example))]
        return root_fn, [self.root, *inputs]

    # What a leaf computes on real values is no part of the trace, though fx intercepts calls within it too.
    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self.computing else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        values = (map_aggregate(part, _value) for part in (args, kwargs))
        positional, named = values
        if kind == "call_method" and target in _SIZE_METHODS:
            return getattr(positional[0], target)(*positional[1:], **named)
        made = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        self.computing = True
        try:
            value = self._run(kind, target, positional, named)
        finally:
            self.computing = False
        if kind.startswith("call") and not _has_tensors(value):
            raise CaptureError(f"{getattr(target, '__name__', target)} gives Python a value that depends on data")
        assert isinstance(made, _SizedProxy)
        made.value = value
        return made

    def _run(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kind == "placeholder":
            return self.example[int(target.removeprefix("input_"))]
        if kind == "get_attr":
            return operator.attrgetter(target)(self.network)
        if kind == "call_function":
            return target(*args, **kwargs)
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return self.network.get_submodule(target)(*args, **kwargs) if kind == "call_module" else None


def _value(proxy: Any) -> Any:
    return proxy.value if isinstance(proxy, _SizedProxy) else proxy


def _has_tensors(value: Any) -> bool:
    found: list[bool] = []
    map_aggregate(value, lambda part: found.append(isinstance(part, Tensor)))  # type: ignore[arg-type, func-returns-value]
    return any(found)


def _finished(graph: fx.Graph) -> fx.Graph:
    for node in graph.nodes:
        node.type = None  # fx cannot write annotations, which are strings here, to a file
    graph.lint()
    return graph


def _any_global_hook() -> bool:
    """Whether hooks are registered for the calls of all modules."""
    hooks = torch.nn.modules.module
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    return any(getattr(hooks, name, None) for name in (*names, "_global_backward_pre_hooks"))
