"""Which layer feeds which, read from a symbolic trace and never guessed.

Only what a trace shows counts: layer A feeds layer B alone, and each is called once. Where a network cannot be
traced as a whole (its forward looks at values or shapes), its parts are traced instead, and nothing is said about
what passes between them.
"""

from __future__ import annotations

from collections import Counter

from torch import fx, nn

from lowrank_cnn.method.layers import CompositeConv2d, FactoredConv2d


class _Tracer(fx.Tracer):
    """Keeps our own layers whole, as torch's are, and whatever has no parts: inside it no layers meet."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = isinstance(m, CompositeConv2d | FactoredConv2d) or not m._modules
        return whole or super().is_leaf_module(m, module_qualified_name)


def successors(model: nn.Module) -> dict[str, str]:
    """For each layer whose output goes to one other layer and nowhere else: that layer, both by name."""
    names = model.named_modules(remove_duplicate=False)
    places = Counter(id(module) for _, module in names)
    pairs = _pairs(model, "")
    return {
        layer: after
        for layer, after in pairs.items()
        if all(places[id(model.get_submodule(name))] == 1 for name in (layer, after))
    }


def _pairs(module: nn.Module, name: str) -> dict[str, str]:
    if not module._modules:
        return {}
    prefix = f"{name}." if name else ""
    graph = _trace(module)
    if graph is None:
        found = (_pairs(child, prefix + key) for key, child in module.named_children())
        return {layer: after for pairs in found for layer, after in pairs.items()}
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    return {
        prefix + str(node.target): prefix + str(user.target)
        for node in graph.nodes
        for user in node.users
        if _alone(node, user) and calls[str(node.target)] == calls[str(user.target)] == 1
    }


def _alone(node: fx.Node, user: fx.Node) -> bool:
    return (
        node.op == user.op == "call_module" and len(node.users) == 1 and user.args == (node,) and not user.kwargs
    )


def _trace(module: nn.Module) -> fx.Graph | None:
    try:
        return _Tracer().trace(module)
    except Exception:  # a forward may fail on symbolic values in any way of its own
        return None
