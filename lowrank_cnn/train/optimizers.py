"""SGD, AdamW and Muon, during whose steps the host never waits: a CUDA graph can replay them.

Learning rates are tensors that the host fills before each step. A mark on the device (`skip`) makes a step change
nothing. Weight decay acts on weights alone; biases and norms are left free.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.branches import BranchedConv2d
from lowrank_cnn.method.chains import FactoredLayer
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.train.recipe import Recipe

_QUINTIC, _NEWTON_SCHULZ_STEPS = (3.4445, -4.7750, 2.0315), 5
"""The Newton-Schulz iteration (Jordan et al., 2024): fast, and exact enough for a direction."""


class Optimizer:
    """The update rule of a recipe over named parameters, with a learning rate for each group of them."""

    def __init__(self, network: nn.Module, recipe: Recipe, skip: Tensor) -> None:
        self.named = dict(network.named_parameters())
        groups = parameter_groups(network, recipe, skip.device)
        self.rates = [(group["lr"], group.pop("factor")) for group in groups]
        self.rules = _rules(groups, recipe, skip)
        for rule in self.rules:
            rule.found_inf = skip  # the fused kernels change nothing while it is 1

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next steps; layers may have a share of it."""
        for tensor, factor in self.rates:
            tensor.fill_(rate * factor)

    def zero_grad(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def step(self) -> None:
        for rule in self.rules:
            rule.step()

    def tensors(self) -> dict[str, Tensor]:
        """The state of all rules, by the names it has in a checkpoint."""
        return {
            f"{_CHECKPOINT_NAMES[kind]}.{name}": tensor
            for name, parameter in self.named.items()
            for rule in self.rules
            for kind, tensor in rule.state.get(parameter, {}).items()
        }


_CHECKPOINT_NAMES = {
    "momentum_buffer": "momentum",
    "exp_avg": "adam_mean",
    "exp_avg_sq": "adam_square",
    "step": "adam_step",
}


def parameter_groups(network: nn.Module, recipe: Recipe, device: torch.device) -> list[dict[str, Any]]:
    """Parameters of one weight decay and one share of the learning rate together; frozen ones are left out.

    Biases of norms may learn faster (Page, 2019). They then have a smaller weight decay, so that each step decays
    all by the same amount.
    """
    named = dict(network.named_parameters())
    norms, chains = nn.modules.batchnorm._BatchNorm, FactoredConv2d | FactoredLayer
    factors = layer_factors(named, recipe.layer_decay, whole_layers(network))
    fast = {f"{name}.bias".lstrip(".") for name, one in network.named_modules() if isinstance(one, norms)}
    joins = {f"{name}.join.weight".lstrip(".") for name, one in network.named_modules() if isinstance(one, chains)}
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        if parameter.requires_grad:
            is_weight = parameter.ndim > 1
            decay, factor = (recipe.weight_decay if is_weight else 0.0), factors[name]
            if name in fast and recipe.bias_rate != 1:
                decay, factor = recipe.weight_decay / recipe.bias_rate, factor * recipe.bias_rate
            elif name in joins:
                factor *= recipe.join_rate
            elif is_strip(parameter):
                factor *= recipe.strip_rate
            groups.setdefault((decay, factor, is_weight), []).append(parameter)
    if not groups:
        raise LowRankError("all weights of the network are frozen: set requires_grad_() on those to train.")
    return [
        {"params": params, "weight_decay": decay, "factor": factor, "lr": torch.zeros((), device=device)}
        for (decay, factor, _), params in groups.items()
    ]


def is_strip(weight: Tensor) -> bool:
    """Whether these are 1xk or kx1 filters over several channels."""
    return weight.ndim > 3 and weight.shape[1] > 1 and sum(side > 1 for side in weight.shape[2:]) == 1


def layer_factors(names: Iterable[str], decay: float, whole: Collection[str] = ()) -> dict[str, float]:
    """The share of the learning rate that each parameter gets: all of it in the last layer, less before."""
    layers = {name: layer_of(name, whole) for name in names}
    order = {layer: number for number, layer in enumerate(dict.fromkeys(layers.values()))}
    return {name: decay ** (len(order) - 1 - order[layer]) for name, layer in layers.items()}


def layer_of(name: str, whole: Collection[str] = ()) -> str:
    """The module that a parameter belongs to; one of a list, as the filter groups of a composite, to the list's.

    Parameters within a module of `whole` belong to that module.

    >>> layer_of("conv1.weight"), layer_of("conv1.weights.0"), layer_of("conv2.join.weight", {"conv2"})
    ('conv1', 'conv1', 'conv2')
    """
    owner, _, own = name.rpartition(".")
    outer = next((place for place in ("", *accumulate(name.split("."), "{}.{}".format)) if place in whole), None)
    if outer is not None:
        return outer
    return owner.rpartition(".")[0] if own.isdecimal() else owner


def whole_layers(network: nn.Module) -> set[str]:
    """The modules that stand for one dense layer: chains, such as a basis and its join, and what has branches."""
    kinds = BranchedConv2d | CompositeConv2d | FactoredConv2d | FactoredLayer
    return {name for name, module in network.named_modules() if isinstance(module, kinds)}


BACKBONE = "backbone"
"""In place of a pattern: everything before the last layer."""


def freeze_parameters(network: nn.Module, patterns: str) -> list[nn.Module]:
    """Freeze the parameters whose names match (`features.*, stem.*`); return the modules with no other parameters.

    `backbone` stands for everything before the last layer. Batch norms among these modules are to stay in
    evaluation mode, or their statistics would go on changing.
    """
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    named = dict(network.named_parameters())
    names, weights = list(named), [name for name, parameter in named.items() if parameter.ndim > 1]
    every = [*names, *(name for name, _ in network.named_buffers())]
    matched = {name for name in every for pattern in wanted if fnmatch(name, pattern)}
    if BACKBONE in wanted and weights:
        whole = whole_layers(network)
        last = layer_of(weights[-1], whole)
        matched |= {name for name in every if layer_of(name, whole) != last}
    if wanted and matched.isdisjoint(names):
        known = ", ".join(names[:3])
        raise LowRankError(f"freeze={patterns!r} matches no parameter of the network, such as {known}.")
    if names and matched.issuperset(names):
        raise LowRankError(f"freeze={patterns!r} leaves nothing to train: freeze=backbone spares the last layer.")
    for name in matched.intersection(names):
        named[name].requires_grad_(False)
    frozen = []
    for name, module in network.named_modules():
        held = list(module.named_parameters(name)) or list(module.named_buffers(name))  # norms may lack weights
        if held and matched.issuperset(key for key, _ in held):
            frozen.append(module)
    return frozen


def in_evaluation(network: nn.Module) -> list[nn.Module]:
    """Modules that the user froze and put into evaluation mode, in a network that trains: they stay so."""
    return [
        module
        for module in network.modules()
        if network.training
        and not module.training
        and {parameter.requires_grad for parameter in module.parameters()} == {False}
    ]


@contextmanager
def flags_restored(network: nn.Module) -> Iterator[None]:
    """Restore which parameters require gradients after a run: the next one may train what this one froze."""
    flags = [(parameter, parameter.requires_grad) for parameter in network.parameters()]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _rules(groups: list[dict[str, Any]], recipe: Recipe, skip: Tensor) -> list[Any]:
    """The rules with their states, which torch makes at the first step only."""
    if recipe.optimizer == "adamw":
        # torch lets a CUDA graph record the step only if it is called capturable, which CPUs do not take.
        adamw = torch.optim.AdamW(
            groups, betas=(recipe.momentum, recipe.beta2), fused=True, capturable=skip.is_cuda
        )
        for parameter in _parameters(groups):
            adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return [adamw]
    matrices = [group for group in groups if recipe.optimizer == "muon" and group["params"][0].ndim > 1]
    others = [group for group in groups if recipe.optimizer == "sgd" or group["params"][0].ndim <= 1]
    rules: list[Any] = [Muon(matrices, recipe.momentum, skip)] if matrices else []
    if others:
        sgd = torch.optim.SGD(others, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True)
        for parameter in _parameters(others):
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        rules.append(sgd)
    return rules


def _parameters(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    return [parameter for group in groups for parameter in group["params"]]


class Muon:
    """Momentum whose update is made orthogonal: every direction of a weight matrix moves alike.

    Jordan et al. (2024), "Muon: an optimizer for hidden layers". A filter is a row. torch's Muon refuses convs.
    """

    found_inf: Tensor

    def __init__(self, groups: list[dict[str, Any]], momentum: float, skip: Tensor) -> None:
        self.groups, self.momentum, self.found_inf = groups, momentum, skip
        self.state = {p: {"momentum_buffer": torch.zeros_like(p)} for p in _parameters(groups)}

    @torch.no_grad()
    def step(self) -> None:
        go_on = 1 - self.found_inf
        for group in self.groups:
            rate = group["lr"] * go_on
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffer = self.state[parameter]["momentum_buffer"]
                # A gradient that is not finite must not enter the momentum: it would never leave.
                gradient = torch.where(go_on > 0, parameter.grad, 0.0)
                buffer.mul_(torch.where(go_on > 0, self.momentum, 1.0)).add_(gradient)
                update = orthogonal((gradient + self.momentum * buffer).flatten(1)).view_as(parameter)
                scale = max(1.0, parameter.shape[0] / parameter[0].numel()) ** 0.5
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.sub_(rate * scale * update)


def orthogonal(matrix: Tensor) -> Tensor:
    """Roughly the nearest matrix with orthonormal rows or columns: its singular values come near 1."""
    a, b, c = _QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).float()
    x = x / (x.norm() + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).to(matrix.dtype)


@torch.no_grad()
def look_ahead(weights: Mapping[str, Tensor], slow: Mapping[str, Tensor], decay: float) -> None:
    """Move slow weights towards the weights, and go on from there: Lookahead (Zhang et al., 2019).

    Statistics of norms are weights too, as in cifar10-airbench.
    """
    names = [name for name, tensor in weights.items() if tensor.is_floating_point()]
    averages, fast = [slow[name] for name in names], [weights[name] for name in names]
    torch._foreach_lerp_(averages, fast, 1 - decay)  # pyright: ignore
    torch._foreach_copy_(fast, averages)  # pyright: ignore
    for name in weights.keys() - set(names):
        slow[name].copy_(weights[name])


def warmup_epochs(recipe: Recipe) -> float:
    """Epochs of the warm-up: a fifth of a short run at most."""
    return min(recipe.warmup, recipe.epochs / 5)


def learning_rate(recipe: Recipe, iteration: int, *, per_epoch: int, drops: int = 0) -> float:
    """The learning rate of one iteration, counted from 0, after `drops` divisions by the drop factor."""
    warmup = round(warmup_epochs(recipe) * per_epoch)
    total = recipe.epochs * per_epoch
    rises = warmup and recipe.schedule != "triangle"  # which has its own rise
    ramp = min(1.0, (iteration + 1) / warmup) if rises else 1.0
    match recipe.schedule:
        case "paper":  # g_t = g_0 / (1 + g_0 lambda t), lambda the weight decay
            rate = recipe.lr / (1 + recipe.lr * recipe.weight_decay * iteration)
        case "poly":  # GoogLeNet's polynomial decay to zero
            rate = recipe.lr * (1 - min(iteration, total) / max(total, 1)) ** recipe.power
        case "cosine":  # half a cosine wave after the warm-up
            done, steps = max(0, iteration - warmup), total - warmup
            rate = recipe.lr * (1 + math.cos(math.pi * min(done, steps) / max(steps, 1))) / 2
        case "triangle" if iteration < warmup:  # up in a straight line, and down in another
            rate = recipe.lr * (recipe.lr_start + (1 - recipe.lr_start) * iteration / warmup)
        case "triangle":
            left = (total - iteration) / max(total - warmup, 1)
            rate = recipe.lr * (recipe.lr_end + (1 - recipe.lr_end) * max(left, 0.0))
        case _:
            rate = recipe.lr
    return ramp * rate / recipe.drop_factor**drops


@dataclass
class LevelOff:
    """Drop when `patience` evaluations in a row bring no gain over the best; stop when a drop has not helped.

    The paper's authors did so by hand. The accuracy is that on held-out training images, never on the test set.
    A gain is more than `min_delta`. At most `levels` drops are made; levelling off after the last one stops. In a
    recipe without levels, `early_stop` is the patience.
    """

    best: float | None = None
    waited: int = 0
    gained: bool = True
    drops: list[int] = field(default_factory=list)

    def update(self, recipe: Recipe, accuracy: float, epoch: int) -> Literal["go", "drop", "stop"]:
        """Judge the accuracy, or a negative loss, reached at the end of an epoch (`epoch` of them are done)."""
        if self.best is None or accuracy > self.best + recipe.min_delta:
            self.best, self.waited, self.gained = accuracy, 0, True
            return "go"
        self.waited += 1
        if self.waited < (recipe.patience if recipe.levels else recipe.early_stop):
            return "go"
        if not self.gained or len(self.drops) == recipe.levels:
            return "stop"
        self.drops.append(epoch)
        self.waited, self.gained = 0, False
        return "drop"
