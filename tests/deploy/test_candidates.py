"""Every way to run a block gives what the block as given does, in float64."""

import pytest
import torch
from torch import nn

from lowrank_cnn.core.compare import difference
from lowrank_cnn.deploy.block_forms import CANDIDATES, groups_apart, in_layers
from lowrank_cnn.deploy.blocks import Block, Epilogue
from lowrank_cnn.deploy.cpu_convs import MatrixConv2d
from lowrank_cnn.method.schemes import build_conv

EPILOGUES = [
    Epilogue(),
    Epilogue("relu", nn.MaxPool2d(2)),
    Epilogue("silu", adds=True),
    Epilogue("leaky_relu:0.1", nn.MaxPool2d(2), adds=True, add_last=True),
    Epilogue("gelu", nn.MaxPool2d(3, 2)),
]


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["dense", "lr", "lr-join", "separable"])
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_every_way_gives_the_same(scheme: str, epilogue: Epilogue):
    layer = build_conv(32, 8, 3, scheme).double().eval()
    x = torch.randn(2, 32, 12, 8, dtype=torch.float64)
    inputs = (x, torch.randn(2, 8, 12, 8, dtype=torch.float64)) if epilogue.adds else (x,)
    block = Block("conv", layer, epilogue)
    made = {name: way.eval() for name, make in CANDIDATES.items() if (way := make(block)) is not None}
    assert {"as given", "minimal filtering"} <= set(made)
    expected = made["as given"](*inputs)
    for name, way in made.items():
        assert difference(way(*inputs), expected) < 1e-9, name


def test_groups_are_rectified_apart_and_products_become_layers():
    net = nn.Sequential(build_conv(3, 8, 3, "lr"), nn.ReLU(), nn.MaxPool2d(2)).eval()
    x = torch.randn(1, 3, 8, 8)
    apart = groups_apart(net)
    assert any(type(part).__name__ == "GroupsApart" for part in apart.modules())
    torch.testing.assert_close(apart(x), net(x))
    planned = nn.Sequential(MatrixConv2d(nn.Conv2d(32, 8, 3, padding=1), Epilogue("relu"))).eval()
    layers = in_layers(planned)
    assert not any(isinstance(part, MatrixConv2d) for part in layers.modules())
    x = torch.randn(1, 32, 6, 6)
    torch.testing.assert_close(layers(x), planned(x), rtol=1e-4, atol=1e-5)


def test_groups_with_a_residual_have_constant_biases(residual: nn.Module):
    net, x = nn.Sequential(residual, build_conv(8, 6, 3, "lr")).eval(), torch.randn(2, 8, 6, 6)
    apart = groups_apart(net)
    torch.testing.assert_close(apart(x), net(x))
    called = [str(node.target) for node in torch.export.export(apart, (x,)).graph.nodes]
    assert called.count("aten.conv2d.default") == 4
    assert not any("split" in name for name in called)  # engines want the bias of a conv as a constant
