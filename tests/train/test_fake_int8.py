"""Training in int8 rounds as the files do, recovers what rounding lost, and leaves the network as it was."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import note
from lowrank_cnn.deploy import quantize as quantizing
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import Exported
from lowrank_cnn.deploy.quantize import quantize
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import build_conv
from lowrank_cnn.models.network import GlobalAveragePool
from lowrank_cnn.train import Recipe, fit
from lowrank_cnn.train.int8 import (
    on_grid,
    ranges_of,
    rounded_by,
    rounded_input,
    rounded_weight,
    rounding,
    trained_in_int8,
)
from lowrank_cnn.train.trained import carried_by, load_checkpoint

INT8 = Recipe(quantize="int8")


def test_values_are_rounded_to_the_levels_of_int8():
    x = torch.tensor([-1.0, -0.5, 0.0, 0.3333, 2.0, 9.0], dtype=torch.float64)
    low, high = on_grid(-1.0, 2.0)
    step = (high - low) / 255
    given = rounded_input(x, torch.tensor([-1.0, 2.0, 1.0]))
    expected = ((x.clamp(low, high) - low) / step).round() * step + low
    assert torch.allclose(given, expected, atol=1e-6)
    assert on_grid(low, high) == pytest.approx((low, high))
    assert given[2] == 0
    weight = torch.randn(5, 3, 3, 3, dtype=torch.float64)
    steps = weight.abs().amax(dim=(1, 2, 3), keepdim=True) / 127
    assert torch.allclose(rounded_weight(weight), (weight / steps).round() * steps, atol=1e-6)


def test_gradients_pass_inside_the_range_and_stop_outside():
    x = torch.tensor([-3.0, 0.4, 5.0], requires_grad=True)
    rounded_input(x, torch.tensor([-1.0, 2.0, 1.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 0]
    weight = torch.randn(4, 6, requires_grad=True)
    rounded_weight(weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(4, 6))  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 8, 3), build_conv(3, 8, 3, "lr"), nn.Linear(12, 4)])
def test_a_layer_rounds_within_the_block_alone(layer: nn.Module):
    x = torch.randn(2, 12) if isinstance(layer, nn.Linear) else torch.randn(2, 3, 12, 12)
    plain, names = layer(x), list(layer.state_dict())
    with rounding(layer, torch.device("cpu")) as state:
        rounded = layer(x)
        assert list(layer.state_dict()) == names
        with torch.no_grad():
            assert torch.equal(layer(input=x), rounded)
        rounded.sum().backward()
    assert 0 < (rounded - plain).abs().max() < 0.1
    assert state.tolist() == pytest.approx([x.min().item(), x.max().item(), 1.0])
    assert all(p.grad is not None for p in layer.parameters())
    assert torch.equal(layer(x), plain)
    assert not list(layer.buffers())
    assert isinstance(layer, CompositeConv2d) or "weight" not in layer.__dict__


def test_ranges_average_over_batches_and_evaluation_leaves_them():
    layer = nn.Conv2d(1, 1, 1)
    with rounding(layer, torch.device("cpu")) as state:
        for most in (1.0, 3.0):
            layer(torch.tensor([0.0, most]).view(1, 1, 1, 2))
        assert state.tolist() == pytest.approx([0.0, 2.0, 2.0])
        with torch.no_grad():
            layer(torch.full((1, 1, 1, 1), 99.0))
        assert state.tolist() == pytest.approx([0.0, 2.0, 2.0])
    assert ranges_of({"a": state, "never": torch.zeros(3)}) == {"a": pytest.approx((0.0, 2.0))}


def with_outlier(driver) -> nn.Sequential:
    """A trained network with large weights for a dead channel: int8 rounds the weights beside them to zero."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(32, 4)]
    net = nn.Sequential(*layers)
    fit(net, driver.tiny_data(), driver.PLAIN, epochs=4, progress=False, device="cpu")
    with torch.no_grad():
        net[0].bias[0] = -100.0
        net[4].weight.view(4, 8, 4)[:, 0] = 127 * 2.1 * net[4].weight.abs().max()
    return net


def rounded_accuracy(net: nn.Module, data) -> float:
    """Top-1 with ranges observed on the test images, without training."""
    trained = carried_by(net)
    images = torch.cat([x for x, _ in _batches(trained, data)])
    labels = torch.cat([y for _, y in _batches(trained, data)])
    with trained_in_int8(net, INT8):
        net(images)  # with gradients, so ranges are observed
        with torch.no_grad():
            return float((net(images).argmax(1) == labels).float().mean())


def _batches(trained, data):
    from lowrank_cnn.data import make_loader

    how = {"preprocess": trained.preprocess, "augment": trained.augment, "train": False, "device": "cpu"}
    return make_loader(data.test, batch_size=24, seed=0, **how).epoch(0)


def test_training_recovers_what_rounding_after_training_lost(driver):
    data, net = driver.tiny_data(), with_outlier(driver)
    assert rounded_accuracy(net, data) <= 0.5
    record = fit(net, data, driver.PLAIN, epochs=8, quantize="int8", progress=False, device="cpu")
    assert record.recipe["quantize"] == "int8"
    assert record.result["top1"] > 0.9
    assert record.result["macs"] > 0
    assert rounded_accuracy(net, data) > 0.9


def composite() -> nn.Sequential:
    first = [build_conv(1, 8, 3, "lr"), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))


def pooled() -> nn.Sequential:
    last = [nn.Conv2d(8, 8, 2), nn.Flatten(), nn.Linear(32, 4)]
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AvgPool2d(2), *last)


def averaged(pool: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), pool, nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("make", "which", "factor", "suffix", "near", "far"),
    [
        (composite, None, 1 / 3, ".onnx", 0.05, 0.5),
        (composite, None, 1 / 3, ".xml", 0.15, 0.5),  # OpenVINO rounds the groups once more before it joins them
        (pooled, "2", 40, ".onnx", 0.05, 0.07),
        (lambda: averaged(nn.AvgPool2d(6)), "2", 1 / 8, ".onnx", 0.05, 0.3),
        (lambda: averaged(GlobalAveragePool()), "2", 1 / 8, ".onnx", 0.05, 0.3),
        (
            lambda: averaged(nn.AdaptiveAvgPool2d(1)),
            "2",
            1 / 8,
            ".xml",
            0.1,
            0.3,
        ),  # rounds again on x86
        (lambda: averaged(nn.AdaptiveAvgPool2d(1)), "2", 1 / 8, ".tflite", 0.05, 0.3),
    ],
)
def test_the_file_has_the_ranges_of_training(driver, tmp_path, make, which, factor, suffix, near, far):
    """Ranges so narrow or so wide that calibration would never find them."""
    pytest.importorskip({".onnx": "onnxruntime", ".xml": "nncf", ".tflite": "onnx_tflite"}[suffix])
    torch.manual_seed(0)
    net, data = make(), driver.tiny_data()
    fit(net, data, driver.PLAIN, epochs=1, quantize="int8", progress=False, device="cpu")
    trained = carried_by(net.eval())
    rounded = (nn.Conv2d, nn.Linear, CompositeConv2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, GlobalAveragePool)
    assert set(trained.ranges) == {name for name, layer in net.named_children() if isinstance(layer, rounded)}
    images = torch.cat([x for x, _ in _batches(trained, data)]).contiguous()
    other = {
        name: on_grid(low * factor, high * factor) if which in (None, name) else (low, high)
        for name, (low, high) in trained.ranges.items()
    }
    with rounded_by(net, other):
        expected = net(images)
    found = quantize(dataclasses.replace(trained, ranges=other), images, tmp_path / f"net{suffix}")
    given = torch.from_numpy(open_engine(found.path)(images.numpy())["output"])
    assert (given - expected).norm() < near * expected.norm()
    assert (net(images) - expected).norm() > far * expected.norm()


def test_a_run_keeps_its_ranges(driver, tmp_path):
    net = driver.tiny_net()
    fit(net, driver.tiny_data(), driver.PLAIN, quantize="int8", out=tmp_path, progress=False, device="cpu")
    kept = load_checkpoint(tmp_path, network=driver.tiny_net())
    assert kept.ranges == carried_by(net).ranges
    assert kept.ranges
    assert kept.recipe.quantize == "int8"
    assert load_checkpoint(tmp_path, network=driver.tiny_net(), best=True).ranges


def test_ranges_of_a_run_on_own_batches_reach_the_file(driver, tmp_path, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    items = torch.utils.data.TensorDataset(torch.randn(16, 1, 8, 8), torch.arange(16) % 2)
    fit(net, (items, items), driver.PLAIN, epochs=1, quantize="int8", progress=False, device="cpu")
    requests = []
    monkeypatch.setattr(
        quantizing, "write_request", lambda _, request, __: requests.append(request) or Exported("", 0, 0)
    )
    quantize(net.eval(), torch.randn(4, 1, 8, 8), tmp_path / "net.onnx")
    assert set(requests[0].ranges) == {"0", "3"}


def test_executorch_refuses_ranges(tmp_path):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten()).eval()
    note(net, int8_ranges={"0": (-1.0, 1.0)})
    with pytest.raises(LowRankError, match=r"go to \.onnx, \.xml and \.tflite"):
        quantize(net, torch.randn(4, 1, 8, 8), tmp_path / "net.pte")


def test_networks_without_such_layers_are_refused(driver):
    from lowrank_cnn.method.shaped_layers import ShapedConv2d

    with pytest.raises(LowRankError, match="has none"), trained_in_int8(nn.ReLU(), INT8):
        pass
    shaped = ShapedConv2d.__new__(ShapedConv2d)
    nn.Module.__init__(shaped)
    with pytest.raises(LowRankError, match="learn shapes first"), trained_in_int8(shaped, INT8):
        pass
    branched = build_conv(4, 4, 3, "lr(branches)")
    with pytest.raises(LowRankError, match="quantise the trained network"), trained_in_int8(branched, INT8):
        pass
