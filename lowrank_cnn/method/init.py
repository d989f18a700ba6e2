r"""The initialisation that lets groups of different shapes train together.

After He et al. (2015), for any composite (Ioannou et al. 2016, appendix A). Back-propagation through a layer is
dx = sum_i W_i^T dy_i: each input value collects, from group i, h_i*w_i*d_i products of a weight and a gradient.
With weights of one variance s^2 for all groups, and a ReLU that passes half of the gradients,

    Var[dx] = 1/2 * (sum_i h_i*w_i*d_i) * s^2 * Var[dy]

stays constant with depth for s = sqrt(2 / sum_i h_i*w_i*d_i), and for s = sqrt(1 / sum) where no ReLU follows: a
basis before its join, the first half of a separable pair. Giving each of N groups its own He sigma instead makes
every group contribute a full Var[dy]: gradients grow N-fold per layer.

Forward, the variance changes by c_in/c_out per layer, which telescopes over the network. `docs/method.md` shows
what borders, fan-in initialisation and PyTorch's default do to a deep stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from lowrank_cnn.core.errors import check_type
from lowrank_cnn.core.notes import notes
from lowrank_cnn.method.branches import BranchedConv2d
from lowrank_cnn.method.chains import FactoredLayer
from lowrank_cnn.method.layers import CompositeConv2d, weights_of
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.method.spec import Composite

Rectified = Callable[[str, nn.Module], bool]

_RECTIFIERS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Hardswish,
    nn.Mish, nn.Softplus,
)  # fmt: skip


def sigma(fan: float, *, relu: bool) -> float:
    """The standard deviation of all weights of a layer, which depends on whether a ReLU follows."""
    return math.sqrt((2.0 if relu else 1.0) / fan)


def composite_sigma(composite: Composite, *, relu: bool = True, channel_groups: int = 1) -> float:
    """The paper's sigma for all groups of a composite: sqrt(2 / fan-out) before a ReLU, sqrt(1 / fan-out) else.

    >>> import lowrank_cnn as lr
    >>> round(lr.composite_sigma(lr.Composite.of([(3, 1, 32), (1, 3, 32)])), 4)
    0.1021
    """
    return sigma(composite.fan_out / channel_groups, relu=relu)


def init_(model: nn.Module, *, relu: Rectified | None = None) -> nn.Module:
    """Initialise every composite, join, dense conv and linear layer in place, biases to zero.

    Whether a ReLU follows is found from the order of the modules (see `followed_by_relu`); give
    `relu(name, module) -> bool` where that order misleads.

    >>> from torch import nn
    >>> import lowrank_cnn as lr
    >>> net = lr.init_(nn.Sequential(lr.CompositeConv2d(64, [(3, 1, 32), (1, 3, 32)]), nn.ReLU()))
    >>> abs(net[0].weights[0].std().item() - 0.102) < 0.01
    True
    """
    check_type("the model", model, nn.Module)
    # Layers that read one input in parallel branches are groups of one composite, whatever lies behind them. A
    # module with such branches names their first layers in its notes, as GoogLeNet's inception does.
    together: dict[nn.Module, list[nn.Module]] = {}
    for module in model.modules():
        layers = [module.get_submodule(entry) for entry in notes(module).entries]
        together |= dict.fromkeys(layers, layers)

    def std(layer: nn.Module, weight: Tensor, rectified: bool) -> float:
        return sigma(sum(_fan(twin, weight, rectified) for twin in together.get(layer, [layer])), relu=rectified)

    return _drawn(model, std, relu)


def per_group_(model: nn.Module) -> nn.Module:
    """He's fan-out sigma for each filter group by itself, ignoring the paper; for comparison."""

    def std(layer: nn.Module, weight: Tensor, rectified: bool) -> float:
        if isinstance(layer, CompositeConv2d):
            return sigma(weight.shape[0] * weight[0, 0].numel() / layer.channel_groups, relu=rectified)
        return sigma(_fan(layer, weight, rectified), relu=rectified)

    return _drawn(model, std)


def fan_in_(model: nn.Module) -> nn.Module:
    """He's fan-in sigma for each filter group by itself, which keeps the variance forwards. For comparison."""
    return _drawn(model, lambda _layer, weight, rectified: sigma(weight[0].numel(), relu=rectified))


def normal_(model: nn.Module, *, std: float = 0.05) -> nn.Module:
    """One normal distribution for all weights, as the published NiN was initialised. For comparison."""
    return _drawn(model, lambda *_: std)


def torch_default_(model: nn.Module) -> nn.Module:
    """PyTorch's own initialisation, each filter group as a conv of its own. For comparison."""
    for _, layer in weight_layers(model):
        if not isinstance(layer, CompositeConv2d):
            layer.reset_parameters()  # type: ignore[operator]
            continue
        for weight in layer.weights:
            if not weight.is_meta:
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        _clear_bias(layer)
    return model


def _drawn(
    model: nn.Module, std: Callable[[nn.Module, Tensor, bool], float], relu: Rectified | None = None
) -> nn.Module:
    """Draw all weights from normal distributions, the deviation of each given by `std`; biases are zero."""
    follows = followed_by_relu(model)
    for name, layer in weight_layers(model):
        rectified = relu(name, layer) if relu else follows[name]
        for weight in weights_of(layer):
            if not weight.is_meta:  # torch would spend a second loading code for nothing
                nn.init.normal_(weight, std=std(layer, weight, rectified))
        _clear_bias(layer)
    return model


INITIALISATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "composite": init_,
    "per-group": per_group_,
    "fan-in": fan_in_,
    "torch": torch_default_,
    "normal": normal_,
}
"""The paper's initialisation and those that it is compared with."""


def weight_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The composites, convs and linear layers of a model, by name, each once.

    A 1x1 conv that trains beside strips is left out: its own norm follows it, so that its scale does not matter.
    """
    beside = {id(module.point) for module in model.modules() if isinstance(module, BranchedConv2d)}
    for name, module in model.named_modules():
        if isinstance(module, CompositeConv2d | nn.Conv2d | nn.Conv3d | nn.Linear) and id(module) not in beside:
            yield name, module


def followed_by_relu(model: nn.Module) -> dict[str, bool]:
    """For each weight layer: does an activation stand between it and the next one, in the order of definition?

    A model that calls its activations as functions shows none of them: there every layer counts as rectified but
    the last, which gives the logits. Inside a chain only the last layer can be.
    """
    chains = ((name, m) for name, m in model.named_modules() if isinstance(m, FactoredConv2d | FactoredLayer))
    inside = {f"{name}.{child}".lstrip(".") for name, chain in chains for child in list(chain._modules)[:-1]}
    layers = [name for name, _ in weight_layers(model)]
    if not any(isinstance(module, _RECTIFIERS) for module in model.modules()):
        return {name: name not in inside and name != layers[-1] for name in layers}
    follows = dict.fromkeys(layers, False)
    current = None
    for name, module in model.named_modules():
        if name in follows:
            current = name
        elif isinstance(module, _RECTIFIERS) and current is not None:
            follows[current] = current not in inside
    return follows


def _fan(layer: nn.Module, weight: Tensor, rectified: bool) -> float:
    """The outgoing connections of an input value; of a linear classifier the incoming ones of a logit.

    The derivation leaves the last layer's sigma free. By fan-out, fewer classes would have larger logits.
    """
    if isinstance(layer, nn.Linear):
        return layer.out_features if rectified else layer.in_features
    if isinstance(layer, CompositeConv2d):
        return layer.fan_out(weight)
    assert isinstance(layer, nn.Conv2d | nn.Conv3d)
    return math.prod(layer.kernel_size) * layer.out_channels / layer.groups


def _clear_bias(layer: nn.Module) -> None:
    if isinstance(layer.bias, nn.Parameter):
        nn.init.zeros_(layer.bias)
