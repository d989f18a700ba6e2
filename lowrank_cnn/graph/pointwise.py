"""Linear layers over channels-last maps as 1x1 convs, which kernels run with what follows them.

ConvNeXt's blocks turn their maps to [N, H, W, C] for a layer norm and two linear layers, and back. The same layers
are 1x1 convs over maps that are turned back after the norm: in memory nothing moves, and activation, layer scale
and residual then follow a conv, as patterns have them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from lowrank_cnn.core.modules import has_hooks
from lowrank_cnn.graph.capture import NetworkGraph, layer_kind
from lowrank_cnn.graph.patterns import activation_of, does_nothing, multiplied_by

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
NORM, LINEAR, SAME, SCALE, BACK = "norm", "linear", "same", "scale", "back"


def linear_as_convs(captured: NetworkGraph) -> None:
    """Rewrite a captured network, and its root, in place."""
    once = captured.called_once()
    for node in list(captured.graph.nodes):
        if _turns(node, LAST):
            steps = _steps(captured, once, node)
            first = next((place for place, (_, kind) in enumerate(steps) if kind == LINEAR), None)
            if first is not None:
                _convert(captured, steps[first:])
    captured.graph.lint()


def _turns(node: fx.Node, order: tuple[int, ...]) -> bool:
    if node.target not in ("permute", torch.permute) or node.kwargs:
        return False
    axes = node.args[1:]
    return tuple(axes[0] if len(axes) == 1 else axes) == order  # type: ignore[arg-type]


def _steps(captured: NetworkGraph, once: dict[str, fx.Node], node: fx.Node) -> list[tuple[fx.Node, str]]:
    """The steps after a permutation to channels-last, as long as only the next step reads each value."""
    steps: list[tuple[fx.Node, str]] = []
    while len(node.users) == 1:
        value, (node,) = node, node.users
        kind = _kind(captured, once, node)
        if kind is None or node.all_input_nodes.count(value) != 1 or (kind == NORM and _has_linear(steps)):
            break
        steps.append((node, kind))
        if kind == BACK:
            break
    return steps


def _has_linear(steps: list[tuple[fx.Node, str]]) -> bool:
    return any(kind == LINEAR for _, kind in steps)


def _kind(captured: NetworkGraph, once: dict[str, fx.Node], node: fx.Node) -> str | None:
    module = captured.module(node)
    if module is not None and has_hooks(module):
        return None  # it would see maps turned another way
    if layer_kind(module) == "linear" and once.get(str(node.target)) is node and len(node.args) == 1:
        return LINEAR
    if isinstance(module, nn.LayerNorm):
        return NORM
    if activation_of(node, module) is not None or does_nothing(module):
        return SAME
    if (found := multiplied_by(captured, node)) is not None:
        return SCALE if found[1].dim() <= 1 else None
    return BACK if _turns(node, FIRST) else None


def _convert(captured: NetworkGraph, steps: list[tuple[fx.Node, str]]) -> None:
    graph, (start, _) = captured.graph, steps[0]
    before: Any = start.args[0]
    with graph.inserting_before(start):
        value: fx.Node = graph.call_method("permute", (before, *FIRST))
    for node, kind in steps:
        if kind == BACK:
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            return
        node.replace_input_with(before, value)
        if kind == LINEAR:
            captured.root.set_submodule(str(node.target), _as_conv(captured.module(node)))
        found = multiplied_by(captured, node) if kind == SCALE else None
        if found is not None and found[1].dim() == 1:
            with graph.inserting_before(node):
                node.replace_input_with(found[0], graph.call_method("reshape", (found[0], -1, 1, 1)))
        before = value = node
    with graph.inserting_after(value):
        turned = graph.call_method("permute", (value, *LAST))
    value.replace_all_uses_with(turned, delete_user_cb=lambda user: user is not turned)


def _as_conv(linear: Any) -> nn.Module:
    """A 1x1 conv with the weights of a linear layer."""
    conv = nn.Conv2d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None, device="meta")
    conv.weight = nn.Parameter(linear.weight.detach()[:, :, None, None], requires_grad=False)
    conv.bias = linear.bias
    return conv.train(linear.training)
