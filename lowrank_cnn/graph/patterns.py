"""Find patterns in a captured network: layer -> norm or scale -> + residual -> activation -> max-pool.

The residual may also be added after the activation, as in Darknet. A `Pattern` lists the nodes of one such
sequence, in which each value is read by the next node only. `rewritten` replaces every pattern by a call of one
module, which takes the layer's input and the residual if there is one. Activations and pools may be modules or
functions.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from lowrank_cnn.core.compare import objection
from lowrank_cnn.core.modules import has_hooks, is_plain
from lowrank_cnn.graph.capture import AUGMENTED, NetworkGraph, layer_kind
from lowrank_cnn.kernels.problem import canonical, is_monotone

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
LAYERS = ("conv", "composite", "chain")


@dataclass(frozen=True)
class Pattern:
    """A layer and what follows it; `nodes` are all of its calls, the layer's first.

    `scale` multiplies the layer's result by a number or by one parameter per channel, as ConvNeXt's layer scale.
    `activation` is a name of `problem.ACTIVATIONS`. With `add_last` the residual is added after the activation.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    norm: fx.Node | None = None
    scale: fx.Node | None = None
    add: fx.Node | None = None
    activation: str | None = None
    pool: nn.MaxPool2d | None = None
    add_last: bool = False

    @property
    def input(self) -> fx.Node:
        """The layer's input."""
        return self.nodes[0].args[0]  # type: ignore[return-value]

    @property
    def residual(self) -> fx.Node | None:
        """The value that `add` adds to the layer's result."""
        if self.add is None:
            return None
        return next(value for value in self.add.all_input_nodes if value not in self.nodes)


_FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.relu: nn.ReLU, torch.relu: nn.ReLU, "relu": nn.ReLU, F.relu_: nn.ReLU, torch.relu_: nn.ReLU,
    "relu_": nn.ReLU, F.leaky_relu: nn.LeakyReLU, F.silu: nn.SiLU, F.hardswish: nn.Hardswish, F.gelu: nn.GELU,
}  # fmt: skip
"""Functions as modules that take the same options in the same order."""
_ADDS = (operator.add, operator.iadd, torch.add, "add", "add_")
_ADDS_IN_PLACE = (operator.iadd, "add_")
_MULTIPLIES = (operator.mul, operator.imul, torch.mul, "mul", "mul_")
_MULTIPLIES_IN_PLACE = (operator.imul, "mul_")


def find_patterns(
    captured: NetworkGraph,
    *,
    norms: bool = False,
    scales: bool = False,
    kinds: tuple[str, ...] = LAYERS,
    accepts: Callable[[fx.Node, dict[str, Any]], bool] = lambda layer, parts: True,
) -> list[Pattern]:
    """The patterns of a network, in the order of its calls.

    `kinds` are the layers that a pattern may begin with, as `layer_kind` names them; "norm" adds the batch norms
    that no other pattern contains. With `norms`, a pattern includes the batch norm after its layer, and with
    `scales` the scale. `accepts` is called with the layer's node and the pattern's parts (fields of `Pattern`); if
    it returns False, the pattern ends.
    """
    walk = _PatternWalk(captured, captured.called_once(), norms, scales, accepts)
    found = [pattern for kind in (set(kinds) - {"norm"}, {"norm"} & set(kinds)) for pattern in walk.patterns(kind)]
    places = {node: place for place, node in enumerate(captured.graph.nodes)}
    return sorted(found, key=lambda pattern: places[pattern.nodes[0]])


def factors(captured: NetworkGraph, layer: fx.Node, node: fx.Node) -> Tensor | None:
    """The factor of each channel, if a node scales a layer's result; else None."""
    stage: Any = captured.module(layer)
    if layer_kind(stage) == "bands":
        return None
    stage = list(stage)[-1] if layer_kind(stage) == "chain" else stage
    weight, axes, filters = next(stage.parameters()), len(stage.stride), stage.out_channels
    if (found := multiplied_by(captured, node)) is None:
        return None
    value = found[1].to(weight) if found[1].dim() == 0 else found[1]
    shape = [1] * (axes + 2 - value.dim()) + list(value.shape)
    fits = value.dtype == weight.dtype and shape == [1, shape[1], *[1] * axes]
    return value.flatten().expand(filters) if fits else None


def multiplied_by(captured: NetworkGraph, node: fx.Node) -> tuple[Any, Tensor] | None:
    """The operand by which a node multiplies, and its value: a number or a parameter; None for other nodes."""
    if node.target not in _MULTIPLIES or node.kwargs or len(node.args) != 2:
        return None
    for other in node.args[:0:-1] if node.target in _MULTIPLIES_IN_PLACE else node.args:
        if isinstance(other, float | int):
            return other, torch.tensor(float(other))
        value = captured.constant(other) if isinstance(other, fx.Node) else None
        if value is not None:
            return other, value
    return None


def rewritten(captured: NetworkGraph, made: Mapping[Pattern, nn.Module]) -> fx.GraphModule:
    """A network in which each pattern is one call of the module made for it, under the layer's name.

    It shares the modules of the captured root. The captured graph is changed and cannot be used again.
    """
    graph = captured.graph
    for pattern, module in made.items():
        layer, last = pattern.nodes[0], pattern.nodes[-1]
        captured.root.set_submodule(pattern.name, module)
        residual = pattern.residual
        inputs = (pattern.input,) if residual is None else (pattern.input, residual)
        with graph.inserting_before(pattern.add or layer):
            call = graph.call_module(pattern.name, inputs)
        last.replace_all_uses_with(call)
        for node in reversed(pattern.nodes):
            operands = node.all_input_nodes if node is pattern.scale else []
            graph.erase_node(node)
            while operands := [one for one in operands if not one.users and one not in pattern.nodes]:
                unread, operands = operands[0], operands[0].all_input_nodes
                graph.erase_node(unread)
    graph.lint()
    return fx.GraphModule(captured.root, graph, class_name=type(captured.root).__name__)


@dataclass
class _PatternWalk:
    """Starts at a layer and goes from each value to its only reader, as long as that is part of a pattern."""

    captured: NetworkGraph
    once: dict[str, fx.Node]
    norms: bool
    scales: bool
    accepts: Callable[[fx.Node, dict[str, Any]], bool]
    taken: set[fx.Node] = field(default_factory=set)

    def patterns(self, kinds: set[str]) -> Iterator[Pattern]:
        """The patterns that begin with a layer of these kinds, the last one first.

        If two layers are added, the later one then computes the sum, and the other is its residual.
        """
        for node in reversed(self.captured.graph.nodes):
            kind = "norm" if self._is_norm(node, self._plain(node)) else layer_kind(self.captured.module(node))
            starts = self.once.get(str(node.target)) is node and node not in self.taken and _reads_one(node)
            if kind in kinds and starts:
                pattern = self._from(node)
                self.taken.update(pattern.nodes)
                yield pattern

    def _from(self, layer: fx.Node) -> Pattern:
        nodes, end, parts = [layer], 1, {}
        while (node := self._reader(nodes[-1])) is not None:
            if not does_nothing(self._plain(node)):
                part = self._part(layer, node, nodes[-1], parts)
                if part is None or not self.accepts(layer, parts | part):
                    break
                parts |= part
                end = len(nodes) + 1
            nodes.append(node)
        return Pattern(str(layer.target), tuple(nodes[:end]), **parts)

    def _reader(self, node: fx.Node) -> fx.Node | None:
        """The one node that reads a value; None if several do, one reads it twice, or another pattern has it."""
        if len(node.users) != 1:
            return None
        (reader,) = node.users
        twice = sum(1 for value in reader.all_input_nodes if value is node) > 1 or reader.args.count(node) > 1
        return None if twice or reader in self.taken or reader.op == "output" else reader

    def _part(self, layer: fx.Node, node: fx.Node, value: fx.Node, parts: dict[str, Any]) -> dict[str, Any] | None:
        """The field that a node adds to the pattern; None if it cannot be part of it."""
        module = self._plain(node)
        if self.norms and not parts and self._is_norm(node, module):
            return {"norm": node}
        if self.scales and not parts and factors(self.captured, layer, node) is not None:
            return {"scale": node}
        if "pool" not in parts and "add" not in parts and self._adds(layer, node, value):
            return {"add": node, "add_last": "activation" in parts}
        activation = None if "activation" in parts else activation_of(node, module)
        if activation is not None and ("pool" not in parts or is_monotone(activation)):
            return {"activation": activation}
        pool = None if "pool" in parts else _pool(node, module)
        return None if pool is None else {"pool": pool}

    def _plain(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls with one argument, if it has its class's forward and no hooks."""
        module = self.captured.module(node)
        return module if module is not None and _reads_one(node) and is_plain(module, type(module)) else None

    def _is_norm(self, node: fx.Node, module: nn.Module | None) -> bool:
        """Whether a node is a batch norm with statistics of its own, called nowhere else."""
        kept = type(module) in NORMS and module.running_mean is not None  # type: ignore[union-attr]
        return kept and self.once.get(str(node.target)) is node

    def _adds(self, layer: fx.Node, node: fx.Node, value: fx.Node) -> bool:
        """Whether a node adds another value to this one, and the layer may compute the sum."""
        if node.target not in _ADDS or node.kwargs or len(node.args) != 2:
            return False
        left, right = node.args
        if node.target in _ADDS_IN_PLACE and left is not value:
            return False  # others that read the residual would see the sum
        return isinstance(right if left is value else left, fx.Node) and self._can_move(layer, node)

    def _can_move(self, layer: fx.Node, add: fx.Node) -> bool:
        """Whether the layer may run just before the sum: nothing that it reads is overwritten before that."""
        fresh = {layer}  # results that the layer's input cannot be a part of
        node = layer.next
        while node is not add:
            module, own = self.captured.module(node), bool(fresh & set(node.all_input_nodes[:1]))
            overwrites = _overwrites(node, module)
            if overwrites and not own:
                return False
            passes_on = own and (overwrites or does_nothing(self._plain(node)))
            if passes_on or type(module) in NORMS or layer_kind(module):
                fresh.add(node)
            node = node.next
        return True


def does_nothing(module: nn.Module | None) -> bool:
    """Whether a module passes its input on: an identity, or dropout in evaluation."""
    dropped = isinstance(module, nn.modules.dropout._DropoutNd) and not module.training
    return type(module) is nn.Identity or (dropped and type(module).__module__.startswith("torch.nn"))


def activation_of(node: fx.Node, module: nn.Module | None) -> str | None:
    """The name of an activation that kernels can fuse, which is a module or a function; None for others."""
    if module is None and node.op != "call_module" and _has_constant_options(node):
        kind = _FUNCTIONS.get(node.target)
        module = None if kind is None else kind(*node.args[1:], **node.kwargs)
    if (call := _only_call(module)) is not None:
        return activation_of(call, None)
    if isinstance(module, nn.LeakyReLU) and is_plain(module, nn.LeakyReLU):
        return canonical(f"leaky_relu:{module.negative_slope}")
    if isinstance(module, nn.GELU) and module.approximate != "none":
        return None
    kinds = {nn.ReLU: "relu", nn.SiLU: "silu", nn.GELU: "gelu", nn.Hardswish: "hardswish"}
    return next((name for kind, name in kinds.items() if is_plain(module, kind)), None)


def _only_call(module: nn.Module | None) -> fx.Node | None:
    """The function that is all of a module's forward, as in transformers' `GELUActivation`; None for others."""
    if module is None or type(module).__module__.startswith("torch.") or has_hooks(module):
        return None
    if module._modules or module._parameters or module._buffers:
        return None
    try:
        *_, call, output = fx.symbolic_trace(module).graph.nodes
    except Exception:  # a forward may fail on symbolic values in any way
        return None
    alone = [value.op for value in call.all_input_nodes] == ["placeholder"] and output.args == (call,)
    return call if alone and call.op != "call_module" else None


def _reads_one(node: fx.Node) -> bool:
    return len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs


def _has_constant_options(node: fx.Node) -> bool:
    """Whether a function's first argument is the only one that is not known."""
    return node.all_input_nodes == list(node.args[:1])


def _overwrites(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a call changes its input in place."""
    if module is not None:
        return bool(getattr(module, "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target in AUGMENTED or name == "setitem" or bool(node.kwargs.get("inplace"))


def _pool(node: fx.Node, module: nn.Module | None) -> nn.MaxPool2d | None:
    """A max-pool that is a module or a function, as a module."""
    if module is not None:
        return module if type(module) is nn.MaxPool2d and not module.return_indices else None
    if node.target not in (F.max_pool2d, torch.max_pool2d) or not _has_constant_options(node):
        return None
    options: dict[str, Any] = dict(zip(_POOL_OPTIONS, node.args[1:], strict=False)) | dict(node.kwargs)
    return None if options.get("return_indices") else nn.MaxPool2d(**options).eval()


_POOL_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
"""In the order of the function's parameters, which differs from the module's."""


def shared_copy(module: nn.Module, *makers: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """New modules around the same parameters and buffers: their modes and parts may be changed.

    A part for which one of `makers` returns a module is replaced by that.
    """
    for make in makers:
        if (made := make(module)) is not None:
            return made
    twin = module.__class__.__new__(module.__class__)  # copy.copy refuses modules with parametrized weights
    twin.__dict__.update(module.__dict__)
    parts = {name: part and shared_copy(part, *makers) for name, part in module._modules.items()}
    twin._modules = parts  # type: ignore[assignment]
    return twin


def split_norm(norm: nn.Module) -> nn.Sequential | None:
    """A batch norm that also drops and activates, such as timm's BatchNormAct2d, as torch's layers in sequence.

    It shares the norm's tensors. Such norms are subclasses with children `drop` and `act`. Their forward calls
    functions, in which no graph shows a norm that can be folded or fused. None for other modules.
    """
    if not isinstance(norm, nn.BatchNorm2d) or list(norm._modules) != ["drop", "act"] or has_hooks(norm):
        return None
    plain = nn.BatchNorm2d.__new__(nn.BatchNorm2d)
    plain.__dict__.update(norm.__dict__)
    plain._modules = {}
    split = nn.Sequential(plain, *map(shared_copy, norm.children()))
    split.training = norm.training
    return split if _is_same(split, norm) else None


def _is_same(split: nn.Module, norm: nn.BatchNorm2d) -> bool:
    """Whether both compute the same in evaluation: a class may use the names of these parts for something else."""
    ours, given = copy.deepcopy((split, norm))  # together, so that the copies share their tensors too
    numbers = torch.Generator().manual_seed(0)
    for tensor in (given.weight, given.bias, given.running_mean, given.running_var):
        if tensor is not None:  # fresh ones would hide the order of the parts
            tensor.data.copy_(torch.rand(tensor.shape, generator=numbers) + 0.5)
    like = next((tensor for tensor in (given.weight, given.running_mean) if tensor is not None), torch.zeros(()))
    x = torch.randn((2, norm.num_features, 2, 2), generator=numbers).to(like)
    return not objection(ours.eval(), given.eval(), x)
