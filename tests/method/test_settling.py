"""A settled network is plain, computes what the masked one computes, and can be written, read and built again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.choose.learn_shapes import ShapeChooser, shape_network
from lowrank_cnn.core.notes import forget
from lowrank_cnn.graph.channels import free_routes
from lowrank_cnn.graph.finalize_shapes import LearnedShapes, finalize_shapes, has_learned, load_shapes
from lowrank_cnn.method.schemes import parse_scheme
from lowrank_cnn.models.build import dense_cost, rebuild, rebuild_options

SCHEMES = ("learned(kx1, 1xk, 1x1, kxk, 5x1, 1x5, multiple=4)", "learned(kx1, 1xk, kxk, multiple=4)")
NETWORKS = [
    ("nin", 16, "batch", SCHEMES[0]),
    ("vgg11", 32, "batch", SCHEMES[1]),
    ("vgg11-gmp", 32, None, SCHEMES[0]),
    pytest.param("resnet18-small", 8, "batch", SCHEMES[1], marks=pytest.mark.nightly),
]


def trained_like(name: str, side: int, norm: str | None) -> nn.Module:
    """A small network with weights and statistics that differ from channel to channel."""
    torch.manual_seed(0)
    net = lr.create_model(name, num_classes=4, width=0.125, image_size=side, norm=norm)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(tensor, 0.5, 2)
    return net.eval()


@pytest.mark.parametrize(("name", "side", "norm", "scheme"), NETWORKS)
def test_it_computes_the_same_within_the_budget(name, side, norm, scheme):
    net, size = trained_like(name, side, norm), (3, side, side)
    shaped = shape_network(net, parse_scheme(scheme), size)
    x = torch.randn(2, *size)
    torch.testing.assert_close(shaped(x), net(x))
    ShapeChooser(shaped, free_routes(shaped, size), lr.count(net, size)).choose(0.5)
    plain = finalize_shapes(shaped, size)  # compares both in float64
    assert not has_learned(plain)
    torch.testing.assert_close(plain(x), shaped(x), rtol=1e-4, atol=1e-4)
    assert lr.count(plain, size).macs <= 0.5 * lr.count(net, size).macs
    assert dense_cost(plain, size) == (lr.count(net, size).macs, lr.count(net, size).params)
    again = rebuild(rebuild_options(plain))
    again.load_state_dict(plain.state_dict())
    assert torch.equal(again.eval()(x), plain(x))


def test_shapes_are_written_read_and_applied(tmp_path):
    net, size = trained_like("nin", 16, "batch"), (3, 16, 16)
    shaped = shape_network(net, parse_scheme(SCHEMES[1]), size)
    ShapeChooser(shaped, free_routes(shaped, size), lr.count(net, size)).choose(0.5)
    plain = finalize_shapes(shaped, size)
    shapes = LearnedShapes.of(plain)
    read = load_shapes(shapes.save(tmp_path / "shapes.json"))
    assert read == shapes
    fresh = read.apply(net)
    assert {n: t.shape for n, t in fresh.state_dict().items()} == {
        n: t.shape for n, t in plain.state_dict().items()
    }
    assert "features.conv2_1" in str(shapes)
    (tmp_path / "other.json").write_text("{}")
    for path, words in (
        (tmp_path / "none.json", "cannot be read"),
        (tmp_path / "other.json", "no learned shapes"),
    ):
        with pytest.raises(lr.LowRankError, match=words):
            load_shapes(path)


def test_a_network_without_masks_is_returned_itself():
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert finalize_shapes(net) is net
    shaped = shape_network(net, parse_scheme("learned"), (3, 8, 8))
    forget(shaped, "input_size")
    with pytest.raises(lr.LowRankError, match="size of the images"):
        finalize_shapes(shaped)
