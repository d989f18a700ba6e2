"""The damage that a smaller shape does, by weights and by gradients."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.choose.shape_costs import shape_network
from lowrank_cnn.choose.shape_damage import damage_by_loss, damage_by_weights
from lowrank_cnn.method.channels import free_routes
from lowrank_cnn.method.schemes import parse_scheme

SIZE = (1, 8, 8)


def shaped_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 2),
    )  # fmt: skip
    return shape_network(net, parse_scheme("learned(kx1, 1xk, kxk, none)"), SIZE)


def test_weights_outside_a_shape_are_lost():
    net = shaped_net()
    conv = net.get_submodule("0")
    with torch.no_grad():
        conv.weight.fill_(0)
        conv.weight[:, 0, :, 1] = 1  # upright filters
    damage = damage_by_weights(net, free_routes(net, SIZE))["0"]
    torch.testing.assert_close(damage.shapes[:, 0], torch.zeros(4).double())
    torch.testing.assert_close(damage.shapes[:, 1], damage.removal * 2 / 3)
    torch.testing.assert_close(damage.removal.sum(), torch.ones(()).double())
    # Upright shapes keep all rows and the middle column, lying ones the middle row and all columns.
    upright, lying, whole = damage.views.sum(2).T
    torch.testing.assert_close(upright, whole)
    torch.testing.assert_close(lying, whole * (1 / 6 + 1 / 2))


def test_the_loss_tells_which_taps_matter_and_the_network_is_left_as_it_was():
    net = shaped_net().train()
    images = torch.randn(16, *SIZE)
    images = images.cumsum(3)  # neighbours in a row resemble each other, rows do not
    targets = (images.diff(dim=3).abs().mean((1, 2, 3)) > 0.8).long()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    damage = damage_by_loss(net, free_routes(net, SIZE), [(images, targets)] * 2, F.cross_entropy)["0"]
    assert (damage.shapes >= 0).all()
    assert (damage.shapes <= damage.removal[:, None] + 1e-12).all()
    assert damage.shapes[:, 2].max() < 1e-12 * damage.whole  # kxk loses nothing
    assert damage.shapes[:, :2].sum() > 0
    assert net.training
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_a_channel_that_nobody_reads_costs_nothing_to_remove():
    net = shaped_net()
    with torch.no_grad():
        net.get_submodule("5").weight[:, 2] = 0
    images, targets = torch.randn(16, *SIZE), torch.arange(16) % 2
    damage = damage_by_loss(net, free_routes(net, SIZE), [(images, targets)], F.cross_entropy)["0"]
    assert damage.removal[2] == 0
    assert (damage.removal[[0, 1, 3]] > 0).all()


def test_the_loss_also_sees_taps_that_are_masked_now():
    net = shaped_net().train()
    conv = net.get_submodule("0")
    conv.choice.fill_(0)
    batch = torch.randn(16, *SIZE), torch.arange(16) % 2
    damage = damage_by_loss(net, free_routes(net, SIZE), [batch], F.cross_entropy)["0"]
    assert bool((damage.shapes[:, 0] > 0).all())  # what a column leaves out, which it does not use now
    assert conv.regrow is False


def test_a_layer_that_no_gradient_reaches_is_judged_by_its_weights():
    net = nn.Sequential(shaped_net(), nn.ReLU())
    with torch.no_grad():
        net.get_submodule("0.5").bias.fill_(-1e3)  # no output is ever above zero
    images, targets = torch.randn(16, *SIZE), torch.arange(16) % 2
    routes = free_routes(net, SIZE)
    by_loss = damage_by_loss(net, routes, [(images, targets)], F.cross_entropy)["0.0"]
    by_weights = damage_by_weights(net, routes)["0.0"]
    assert torch.equal(by_loss.removal, by_weights.removal)
    assert torch.equal(by_loss.shapes, by_weights.shapes)
    assert by_loss.removal.min() > 0


def test_gradients_too_small_to_compare_do_not_count():
    net = shaped_net()
    routes, batch = free_routes(net, SIZE), (torch.randn(16, *SIZE), torch.arange(16) % 2)
    found = damage_by_loss(net, routes, [batch], lambda *given: 1e-20 * F.cross_entropy(*given))["0"]
    assert torch.equal(found.views, damage_by_weights(net, routes)["0"].views)


def test_damage_of_frozen_weights_is_measured_and_they_stay_frozen():
    net = shaped_net()
    net.get_submodule("0").weight.requires_grad_(False)
    images, targets = torch.randn(16, *SIZE), torch.arange(16) % 2
    assert damage_by_loss(net, free_routes(net, SIZE), [(images, targets)], F.cross_entropy)["0"].whole > 0
    assert not net.get_submodule("0").weight.requires_grad
