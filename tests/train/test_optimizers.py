"""Rules, rates, schedules, frozen layers, and what short runs add to them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.method.convert import convert
from lowrank_cnn.models import create_model
from lowrank_cnn.train import Recipe, fit
from lowrank_cnn.train.inputs import patch_covariance, whitening_filters
from lowrank_cnn.train.optimizers import Optimizer, freeze_parameters, layer_factors, learning_rate, orthogonal
from lowrank_cnn.train.step import TrainingStep
from tests.train.driver import batch, make_step, normed

CPU = torch.device("cpu")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)).double()


def stepped(network: nn.Module, recipe: Recipe, steps: int = 3, skip: float = 0.0) -> Optimizer:
    rule = Optimizer(network, recipe, torch.tensor(skip))
    rule.set_rate(recipe.lr)
    take_steps(network, rule, steps)
    return rule


def take_steps(network: nn.Module, rule: torch.optim.Optimizer | Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        rule.zero_grad()
        images = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(step)).double()
        network(images).square().sum().backward()
        rule.step()


def groups(network: nn.Module, decay: float) -> list[dict]:
    parameters = list(network.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("fields", "theirs", "options"),
    [
        ({}, torch.optim.SGD, {"momentum": 0.9}),
        ({"nesterov": True}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ({"optimizer": "adamw", "beta2": 0.95}, torch.optim.AdamW, {"betas": (0.9, 0.95)}),
    ],
)
def test_rules_are_torchs(fields: dict, theirs: type, options: dict) -> None:
    ours, plain = net(), net()
    stepped(ours, Recipe(lr=0.01, weight_decay=0.1, **fields))
    take_steps(plain, theirs(groups(plain, 0.1), lr=0.01, **options))
    assert_equal(ours, plain)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_the_muon_update_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(
        orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(1)).double())
    )
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.5


def test_muon_is_its_definition() -> None:
    ours, plain = net(), net()
    recipe = Recipe(optimizer="muon", lr=0.01, momentum=0.9, weight_decay=0.1)
    stepped(ours, recipe, steps=1)
    images = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    plain(images).square().sum().backward()
    weight = plain[0].weight
    update = orthogonal((1.9 * weight.grad).flatten(1)).view_as(
        weight
    )  # the first step: buffer and gradient agree
    expected = weight * (1 - 0.01 * 0.1) - 0.01 * update
    torch.testing.assert_close(ours[0].weight, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours[3].bias, plain[3].bias - 0.01 * plain[3].bias.grad)  # biases by SGD


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_a_skipped_step_changes_nothing_at_all(optimizer: str) -> None:
    network = net()
    before = {name: value.clone() for name, value in network.named_parameters()}
    rule = stepped(network, Recipe(optimizer=optimizer, lr=0.1), skip=1.0)
    assert all(torch.equal(value, before[name]) for name, value in network.named_parameters())
    assert all(not tensor.any() for tensor in rule.tensors().values())


def test_layer_wise_rates() -> None:
    names = ["0.weight", "0.bias", "1.weight", "head.weight"]
    assert list(layer_factors(names, 0.5).values()) == [0.25, 0.25, 0.5, 1.0]
    ours, whole = net(), net()
    stepped(ours, Recipe(lr=0.01, layer_decay=0.5, weight_decay=0), steps=1)
    stepped(whole, Recipe(lr=0.01, weight_decay=0), steps=1)
    start = net()
    for index, share in ((0, 0.25), (3, 1.0)):
        moved, all_of_it = (other[index].weight - start[index].weight for other in (ours, whole))
        torch.testing.assert_close(moved, share * all_of_it)


def test_frozen_layers_stay_and_so_do_their_statistics(driver) -> None:
    network = driver.tiny_net(stateful=True)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    recipe = dataclasses.replace(driver.PLAIN, freeze="0.*, 1.*", epochs=1)
    fit(network, driver.tiny_data(), recipe, progress=False, device="cpu")
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"6.weight", "6.bias"}


def test_the_backbone_is_all_but_the_last_layer() -> None:
    for name, last in (("nin-c3-lr", "features.classes"), ("resnet18", "classes"), ("vgg11-gmp", "head.fc8")):
        with torch.device("meta"):
            network = create_model(name, width=0.1)
        freeze_parameters(network, "backbone")
        trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
        assert trained == {f"{last}.weight", f"{last}.bias"}


def test_what_cannot_be_frozen_or_trained(driver) -> None:
    with pytest.raises(LowRankError, match=r"freeze='\*' leaves nothing to train: freeze=backbone"):
        freeze_parameters(net(), "*")
    with pytest.raises(LowRankError, match=r"freeze='stem.\*' matches no parameter.*such as 0.weight"):
        freeze_parameters(net(), "stem.*")
    network = driver.tiny_net().requires_grad_(False)
    with pytest.raises(LowRankError, match="all weights of the network are frozen"):
        fit(network, driver.tiny_data(), driver.PLAIN, progress=False, device="cpu")


def test_a_norm_without_weights_is_frozen_with_the_backbone() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(4, 2))
    assert network[1] in freeze_parameters(network, "backbone")
    assert network[1] in freeze_parameters(network, "0.*, 1.*")
    assert network[1] not in freeze_parameters(network, "0.*")


def test_a_later_run_trains_what_an_earlier_one_froze(driver) -> None:
    network = driver.tiny_net(stateful=True)
    recipe = dataclasses.replace(driver.PLAIN, freeze="backbone", epochs=1)
    fit(network, driver.tiny_data(), recipe, progress=False, device="cpu")
    assert all(parameter.requires_grad for parameter in network.parameters())
    before = network[0].weight.clone()
    fit(network, driver.tiny_data(), dataclasses.replace(recipe, freeze=""), progress=False, device="cpu")
    assert not torch.equal(network[0].weight, before)


def test_a_norm_that_the_user_froze_keeps_its_statistics(driver) -> None:
    network = driver.tiny_net(stateful=True)
    norms = [module for module in network if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.requires_grad_(False).eval()
    before = [norm.running_mean.clone() for norm in norms]
    fit(network, driver.tiny_data(), dataclasses.replace(driver.PLAIN, epochs=1), progress=False, device="cpu")
    assert norms
    assert all(torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, before, strict=True))
    assert not any(norm.training or norm.weight.requires_grad for norm in norms)


@pytest.mark.parametrize("scheme", ["lr", "lr(branches)", "lr-join", "lr-join(branches)", "separable", "cp"])
def test_a_rewritten_layer_has_the_depth_of_the_dense_one(scheme: str) -> None:
    """Branches, filter groups and the layers of a chain learn at one rate, that of the layer they stand for."""
    dense = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 2))
    step = TrainingStep(convert(dense, scheme), dense, torch.Tensor.backward, Recipe(layer_decay=0.5), CPU)
    step.optimizer.set_rate(1.0)
    rates = {
        id(parameter): float(group["lr"])
        for rule in step.optimizer.rules
        for group in rule.param_groups
        for parameter in group["params"]
    }
    found = {(name.partition(".")[0], rates[id(value)]) for name, value in step.parameters.items()}
    assert found == {("0", 0.25), ("1", 0.5), ("2", 1.0)}


@pytest.mark.parametrize("scheme", ["lr-join", "lr(branches)"])
def test_the_last_layer_is_spared_as_a_whole(scheme: str) -> None:
    network = convert(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)), scheme)
    freeze_parameters(network, "backbone")
    trained = {(name.partition(".")[0], value.requires_grad) for name, value in network.named_parameters()}
    assert trained == {("0", False), ("1", True)}


@pytest.mark.parametrize(
    ("schedule", "iteration", "share"),
    [
        ("constant", 50, 1),
        ("paper", 0, 1),
        ("paper", 20_000, 1 / 2),  # 1 / (1 + 0.1 * 0.0005 * 20000)
        ("paper", 1_000_000, 1 / 51),
        ("poly", 0, 1),
        ("poly", 75, 1 / 2),
        ("poly", 100, 0),
        ("poly", 101, 0),
        ("cosine", 0, 1),
        ("cosine", 50, 1 / 2),
        ("cosine", 25, (1 + math.sqrt(0.5)) / 2),
        ("cosine", 100, 0),
        *(("warm cosine", at, share) for at, share in ((0, 0.05), (2, 0.15), (19, 1), (20, 1), (60, 1 / 2))),
        *(("triangle", at, share) for at, share in ((0, 0.2), (10, 0.6), (20, 1), (60, 0.55), (100, 0.1))),
    ],
)
def test_the_rate_follows_its_schedule(schedule, iteration, share):
    warm = {"warm cosine": 4.0, "triangle": 4.0}.get(schedule, 0.0)
    more = {"power": 0.5, "warmup": warm, "lr_start": 0.2, "lr_end": 0.1}
    recipe = Recipe(schedule=schedule.split()[-1], lr=0.1, weight_decay=5e-4, epochs=20, **more)
    assert learning_rate(recipe, iteration, per_epoch=5) == pytest.approx(0.1 * share)


def trained(recipe: Recipe, steps: int) -> TrainingStep:
    step = make_step(normed(), recipe)
    for iteration in range(steps):
        step.prepare(0.1, iteration, epochs=iteration / steps)
        step(*batch())
    return step


def test_biases_of_norms_learn_by_a_rate_and_a_decay_of_their_own():
    step = trained(Recipe(epochs=1, momentum=0.9, nesterov=True, weight_decay=0.01, bias_rate=8.0), 5)
    other = normed()
    weights, rest = [other[0].weight, other[3].weight], [other[0].bias, other[1].weight, other[3].bias]
    groups = [
        {"params": weights, "weight_decay": 0.01},
        {"params": rest, "weight_decay": 0.0},
        {"params": [other[1].bias], "lr": 0.8, "weight_decay": 0.01 / 8},
    ]
    plain = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(5):
        plain.zero_grad()
        images, labels = batch()
        F.cross_entropy(other(images), labels).backward()
        plain.step()
    for name, value in other.state_dict().items():
        torch.testing.assert_close(step.weights[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_strips_and_joins_learn_by_rates_of_their_own(optimizer: str):
    recipe = Recipe(epochs=1, optimizer=optimizer, strip_rate=3.0, join_rate=4.5, weight_decay=0.0)
    net = nn.Sequential(
        lr.build_conv(3, 8, 3, "lr"), lr.build_conv(8, 8, 3, "lr-join"), lr.build_conv(8, 8, 3, "separable"),
        lr.build_conv(8, 8, 3, "mixture"), nn.Conv2d(8, 8, (1, 3), groups=8),
    )  # fmt: skip
    own = Optimizer(net, recipe, torch.zeros(()))
    own.set_rate(0.1)
    rates = {id(p): float(group["lr"]) for rule in own.rules for group in _groups(rule) for p in group["params"]}
    for name, parameter in net.named_parameters():
        strip = parameter.ndim == 4 and sorted(parameter.shape[2:]) == [1, 3] and not name.startswith("4.")
        factor = 4.5 if name.endswith("join.weight") else 3.0 if strip else 1.0
        assert rates[id(parameter)] == pytest.approx(0.1 * factor), name


def _groups(rule) -> list[dict]:
    return rule.groups if hasattr(rule, "groups") else rule.param_groups


def test_lookahead_happens_every_so_many_steps_of_a_run():
    plain, slowed = (trained(Recipe(epochs=1, lookahead=k, lookahead_decay=0.5), 4) for k in (0, 2))
    assert not plain.averages
    name = "3.weight"
    assert not torch.equal(plain.weights[name], slowed.weights[name])
    # What was blended last, before the third step, is not what the last two steps have made since.
    again = trained(Recipe(epochs=1, lookahead=2, lookahead_decay=0.5), 2)
    slow, fast = again.averages[name].clone(), again.weights[name].clone()
    again.prepare(0.1, 2, epochs=2 / 4)
    blended = again.weights[name]
    assert torch.equal(again.averages[name], blended)
    torch.testing.assert_close(blended, slow.lerp(fast, 1 - 0.5 * 0.5**3))  # in the middle of the run


def smooth_images(n: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(n)
    return F.avg_pool2d(torch.randn(n, 3, 14, 14, generator=draw), 3, stride=1)


def squares(n: int) -> Data:
    images = (smooth_images(n) * 60 + 128).clamp(0, 255).to(torch.uint8)
    split = ResidentSplit.of(images, torch.arange(n) % 2)
    return Data("squares", ("a", "b"), split, split)


@pytest.mark.parametrize(("filters", "shape"), [(24, (2, 2)), (10, (3, 1)), (60, (3, 3))])
def test_filters_give_patches_equal_variance_and_no_correlation(filters: int, shape: tuple[int, int]):
    images = 10 * smooth_images(64)  # so that epsilon is small beside every variance
    weight = torch.randn(filters, 3, *shape)
    white = whitening_filters(weight, patch_covariance(images, weight.shape[2:], torch.Tensor.clone))
    pairs = min(3 * shape[0] * shape[1], filters // 2)
    torch.testing.assert_close(white[:pairs], -white[pairs : 2 * pairs])
    outputs = F.conv2d(images.double(), white.double()).transpose(0, 1).flatten(1)
    seen = outputs[:pairs] @ outputs[:pairs].T / outputs.shape[1]
    torch.testing.assert_close(seen, torch.eye(pairs, dtype=seen.dtype), atol=0.05, rtol=0)
    assert outputs.pow(2).mean(1).sub(1).abs().max() < 0.05  # those left over too


@pytest.mark.parametrize("scheme", ["dense", "lr"])
def test_fit_whitens_the_first_layer_and_trains_what_is_behind_it(scheme: str):
    torch.manual_seed(0)
    net = nn.Sequential(
        lr.build_conv(3, 24, 3, scheme, bias=False),
        nn.ReLU(),
        nn.Conv2d(24, 2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    before = [p.clone() for p in net.parameters()]
    recipe = Recipe(batch_size=16, epochs=1, lr=0.1, whiten_first=True)
    lr.fit(net, squares(32), recipe, device="cpu", progress=False)
    first, behind = list(net[0].parameters()), list(net[2].parameters())
    assert not any(p.requires_grad for p in first)
    assert not torch.equal(first[0], before[0])
    assert not torch.equal(behind[0], before[len(first)])
    kept = [p.clone() for p in first]
    lr.fit(net, squares(32), Recipe(batch_size=16, epochs=1, lr=0.1), device="cpu", progress=False)
    assert all(torch.equal(a, b) for a, b in zip(kept, first, strict=True))


def test_a_network_without_a_first_conv_is_refused():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 2))
    recipe = Recipe(batch_size=16, epochs=1, whiten_first=True)
    with pytest.raises(LowRankError, match="begins with a conv"):
        lr.fit(net, squares(32), recipe, device="cpu", progress=False)
