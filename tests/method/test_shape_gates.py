"""Gates: draws that cost what is allowed, and that learn which shape serves the loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.method.schemes import parse_scheme
from lowrank_cnn.method.shape_choice import ShapeCosts
from lowrank_cnn.method.shape_costs import mac_costs, shape_network
from lowrank_cnn.method.shape_damage import shaped_convs
from lowrank_cnn.method.shape_gates import add_gates, charge_gates, close_gates, damage_by_gates, learn_gates
from lowrank_cnn.method.shaped_layers import ShapedConv2d

SIZE = (2, 8, 8)


def gated() -> tuple[nn.Module, ShapeCosts, ShapedConv2d]:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 2))
    network = shape_network(dense, parse_scheme("learned(kx1, 1xk, kxk)"), SIZE)
    add_gates(network)
    return network, mac_costs(network, dense, SIZE), shaped_convs(network)["0"]


def test_a_filter_draws_in_training_and_has_its_likeliest_shape_in_evaluation():
    network, _, layer = gated()
    layer.gates.zero_()  # type: ignore[union-attr]
    network.train()
    drawn = torch.stack([layer.shaped_weight()[:, 0] != 0 for _ in range(20)])
    assert not torch.equal(drawn[0], drawn[1])
    assert set(drawn.sum((2, 3)).flatten().tolist()) == {3, 9}
    layer.gates[:, 1] = 1.0  # type: ignore[index]
    rows = layer.eval().shaped_weight()
    assert bool((rows[:, :, [0, 2]] == 0).all())
    assert bool((rows[:, :, 1] != 0).all())


@pytest.mark.parametrize("share", [0.9, 0.6, 0.45])
def test_draws_cost_on_average_what_is_allowed(share: float):
    network, costs, layer = gated()
    charge_gates(network, costs, share)
    assert layer.gates is not None
    likely = (layer.gates - layer.charge).softmax(1)
    cost = float((likely * torch.tensor(costs.filters["0"])).sum()) + costs.rest
    assert cost <= share * costs.dense * 1.001
    assert cost >= share * costs.dense * 0.99 or bool((layer.charge == 0).all())


def test_gates_learn_the_shape_that_serves_the_loss():
    """The loss asks for what lies along a row: filters come to draw rows, and columns least."""
    network, _, layer = gated()
    layer.gates.zero_()  # type: ignore[union-attr]
    before = [buffer.clone() for name, buffer in network.named_buffers() if not name.endswith("gates")]
    with torch.no_grad():
        layer.weight.fill_(1.0)
    images = torch.randn(64, *SIZE)
    row = torch.zeros(16, 2, 3, 3)
    row[:, :, 1] = 1.0
    wanted = nn.functional.conv2d(images, row, padding=1)

    def loss(outputs: Tensor, _: object) -> Tensor:
        return (seen[-1] - wanted).square().mean() + 0 * outputs.sum()

    seen: list[Tensor] = []
    layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    learn_gates(network.train(), [(images, None)] * 30, loss)
    assert layer.gates is not None
    assert int((layer.gates.argmax(1) == 1).sum()) >= 14
    assert not layer.gates.requires_grad
    after = [buffer for name, buffer in network.named_buffers() if not name.endswith("gates")]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    damage = damage_by_gates(network)["0"]
    assert torch.equal(damage.shapes.argmin(1), layer.gates.argmax(1))
    assert float(damage.shapes.min()) >= 0


def test_closed_gates_leave_the_shapes_that_were_chosen():
    network, _, layer = gated()
    layer.choice.fill_(0)
    close_gates(network)
    columns = network.train() and layer.shaped_weight()
    assert bool((columns[..., [0, 2]] == 0).all())
