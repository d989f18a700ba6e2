"""Find the convs whose output channels may be reordered, from the network's graph.

The channels of a conv are free if everything on their way treats each channel by itself (a batch norm,
activations, pooling, dropout, flattening) until convs and linear layers read them. Then the filters can be sorted,
if the norms and the reading layers follow. The order of channels is fixed if they meet others in a
sum, a concatenation or a product, or reach the network's output.

Functions are not looked up in a list. Each is tried on random channels, on the same channels permuted, and with
one of them changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from lowrank_cnn.core.errors import first_line
from lowrank_cnn.core.modules import is_part_of
from lowrank_cnn.graph.capture import CaptureError, capture, layer_kind
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.method.select import parameter_uses
from lowrank_cnn.method.shaped_layers import ShapedConv2d

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


@dataclass(frozen=True)
class Route:
    """The norms and layers that read the free channels of a conv.

    Of a layer each channel is as many input features as `readers` says: more than one after flattening.
    """

    norms: tuple[str, ...]
    readers: Mapping[str, int]


def free_routes(model: nn.Module, input_size: Sequence[int]) -> dict[str, Route]:
    """The convs whose channels are free, by name; none of a network whose graph cannot be captured.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> free_routes(net, (3, 8, 8))
    {'0': Route(norms=(), readers={'2': 1})}
    """
    try:
        walk = _Walk(model, input_size)
        routes = walk.routes()
        # A layer that runs in training alone, such as an auxiliary head, reads channels too.
        trained = _Walk(model, input_size, training=True).routes() if walk.has_idle_layers else routes
    except CaptureError:
        return {}
    return {name: route for name, route in routes.items() if trained.get(name) == route}


class _Walk:
    """Follows the channels of each conv through a captured network, whose values on random images are known."""

    def __init__(self, model: nn.Module, input_size: Sequence[int], *, training: bool = False) -> None:
        """Capture a copy of the network, and run it on random images.

        In `training` only modules with parts are in that mode: they decide what runs. Dropout would draw numbers.
        """
        root = copy_with(model).eval().cpu()
        for module in root.modules():
            module.training = training and any(True for _ in module.children())
        dtype = next((p.dtype for p in root.parameters()), torch.float32)
        image = torch.randn(2, *input_size, dtype=dtype, generator=torch.Generator().manual_seed(0))
        try:
            with torch.no_grad():
                self.captured = capture(root, image)
                network = fx.GraphModule(root, self.captured.graph)
                self.interpreter = fx.Interpreter(network, garbage_collect_values=False)
                self.interpreter.run(image)
        except Exception as error:  # a forward may fail in any way without real values
            raise CaptureError(first_line(error)) from error
        self.values: dict[fx.Node, Any] = self.interpreter.env
        uses = parameter_uses(root)
        # A layer that shares a parameter cannot follow: the other layer would have to read the same order.
        self.once = {
            name: node
            for name, node in self.captured.called_once().items()
            if all(uses[id(parameter)] == 1 for parameter in root.get_submodule(name).parameters())
        }

    @property
    def has_idle_layers(self) -> bool:
        """Whether a layer does not run."""
        called = self.captured.called()
        return any(
            (isinstance(module, ShapedConv2d) or layer_kind(module) is not None)
            and not any(is_part_of(name, one) for one in called)
            for name, module in self.captured.root.named_modules()
        )

    def routes(self) -> dict[str, Route]:
        convs = {name: node for name, node in self.once.items() if _is_conv(self.captured.module(node))}
        return {name: route for name, node in convs.items() if (route := self._route(node)) is not None}

    def _route(self, conv: fx.Node) -> Route | None:
        channels, norms, readers = self.values[conv].shape[1], [], {}
        ways = [conv]
        while ways:
            value = ways.pop()
            for user in value.users:
                module = self.captured.module(user)
                alone = self.once.get(str(user.target)) is user and user.args == (value,) and not user.kwargs
                if type(module) in _NORMS and alone and self.values[value].shape[1] == channels:
                    norms.append(str(user.target))
                    ways.append(user)
                elif _reads_channels(module, self.values[value]) and alone:
                    readers[str(user.target)] = self.values[value].shape[1] // channels
                elif self._is_size(user):
                    continue
                elif self._keeps_apart(user, value, channels):
                    ways.append(user)
                else:
                    return None
        return Route(tuple(norms), readers) if readers else None

    def _is_size(self, node: fx.Node) -> bool:
        """Whether the value of a node follows from shapes alone."""
        return node.op != "output" and isinstance(self.values.get(node), int | torch.Size)

    def _keeps_apart(self, node: fx.Node, value: fx.Node, channels: int) -> bool:
        """Whether a function takes channels apart and in their order, without weights of its own."""
        module = self.captured.module(node)
        if node.op == "output" or (module is not None and any(True for _ in module.state_dict())):
            return False
        others = [other for other in node.all_input_nodes if other is not value]
        given, result = self.values[value], self.values.get(node)
        if not all(map(self._is_size, others)) or not isinstance(result, Tensor) or result.dim() < 2:
            return False
        if len(result) != len(given) or result.shape[1] % channels:
            return False

        def call(x: Tensor) -> Any:
            both: Any = (node.args, node.kwargs)
            concrete = map_arg(both, lambda other: x.clone() if other is value else self.values[other])
            return getattr(self.interpreter, node.op)(node.target, *concrete)

        try:
            return _treats_apart(call, given.shape, channels)
        except Exception:  # a function of the user may fail on random numbers
            return False


def _treats_apart(function: Any, shape: Sequence[int], channels: int) -> bool:
    """Whether permuting channels permutes the results, and changing one channel changes its own results only."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tuple(shape), generator=draw).unflatten(1, (channels, -1))
    order = torch.randperm(channels, generator=draw)
    changed = x.clone()
    changed[:, 0] = -changed[:, 0] - 1
    plain, permuted, other = (
        function(given.flatten(1, 2)).unflatten(1, (channels, -1)) for given in (x, x[:, order], changed)
    )
    return torch.allclose(permuted, plain[:, order]) and torch.equal(other[:, 1:], plain[:, 1:])


def _is_conv(module: nn.Module | None) -> bool:
    plain = layer_kind(module) == "conv" and isinstance(module, nn.Conv2d) and module.groups == 1
    return plain or isinstance(module, ShapedConv2d)


def _reads_channels(module: nn.Module | None, value: Tensor) -> bool:
    return (layer_kind(module) == "linear" and value.dim() == 2) or (_is_conv(module) and value.dim() == 4)
