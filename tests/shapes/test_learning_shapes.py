"""Filters learn their shapes: the right ones if they are known, within the budget, and the same when resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowrank_cnn as lr
from lowrank_cnn.choose import learn_shapes as learning_shapes
from lowrank_cnn.choose import shape_costs as shape_budget
from lowrank_cnn.choose.learn_shapes import Learned, learn_shapes
from lowrank_cnn.choose.shape_costs import time_costs
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.method.finalize_shapes import has_learned
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.train import Recipe
from lowrank_cnn.train.trained import load_checkpoint
from tests.shapes import driver

RECIPE = Recipe(name="stripes", batch_size=16, epochs=10, lr=0.1, mirror=False, weight_decay=0.01)
QUIET = {"progress": False, "device": "cpu"}


def stripes(*, upright: bool = False, n: int = 128) -> Data:
    """Images whose rows (or columns) are waves that begin anywhere; the class is the length of the wave.

    Half of each row is bright, and rows do not depend on each other: only taps along a row tell classes apart.
    """

    def split(count: int, seed: int) -> ResidentSplit:
        draw = torch.Generator().manual_seed(seed)
        labels = torch.arange(count) % 3
        places = torch.randint(0, 12, (count, 12, 1), generator=draw) + torch.arange(12)
        images = (places // (1 + labels)[:, None, None] % 2)[:, None].to(torch.uint8) * 200
        images = images.transpose(2, 3) if upright else images
        return ResidentSplit.of(images.contiguous(), labels)

    return Data("stripes", ("one", "two", "three"), split(n, 0), split(48, 1))


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


class Residual(nn.Module):
    """A network of the user's own whose maps meet in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.inner = nn.Conv2d(8, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.outer = nn.Conv2d(16, 8, 3, padding=1)
        self.classes = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(x + self.outer(torch.relu(self.norm(self.inner(x)))))
        return self.classes(x.mean((2, 3)))


def test_strips_longer_than_the_kernel_are_taken_where_they_serve():
    def split(seed: int) -> ResidentSplit:
        draw = torch.Generator().manual_seed(seed)
        labels = torch.arange(256) % 2
        bits = torch.randint(0, 2, (256, 12, 4), generator=draw)
        flip = torch.randint(0, 2, (256, 12, 4), generator=draw)
        far = torch.where(labels[:, None, None] == 1, bits, flip)  # four columns on: the same bits, or others
        images = torch.cat([bits, far, bits], 2)[:, None].to(torch.uint8) * 200
        return ResidentSplit.of(images.contiguous(), labels)

    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)]
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), *head)
    images, recipe = Data("far", ("other", "same"), split(0), split(1)), replace(RECIPE, weight_decay=0.02)
    found = learn_shapes(net, images, recipe, macs=0.56, shapes=("1x3", "1x5", "5x1", "kxk"), **QUIET)
    assert dict(found.shapes.layers["0"].shapes).get("1x5", 0) >= 4


@pytest.mark.parametrize(("upright", "shape"), [(False, "1x3"), (True, "3x1")])
def test_most_filters_become_rows_where_images_are_stripes(upright, shape):
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)]
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), *head)
    recipe = replace(RECIPE, weight_decay=0.1)  # which lets taps that tell nothing vanish
    images = stripes(upright=upright, n=256)
    found = learn_shapes(net, images, recipe, macs=0.345, shapes=("kx1", "1xk", "kxk"), **QUIET)
    assert dict(found.shapes.layers["0"].shapes)[shape] >= 6
    assert found.macs <= 0.345  # strips alone are within the budget


def test_the_result_is_plain_and_computes_what_was_trained():
    found = learn_shapes(
        Residual(), stripes(), RECIPE, macs=0.5, shapes=("kx1", "1xk", "1x1", "kxk", "none"), epochs=4, **QUIET
    )
    assert not has_learned(found.network)
    assert {type(m) for m in found.network.modules()} <= {Residual, nn.Conv2d, CompositeConv2d, nn.BatchNorm2d,
                                                          nn.Linear, nn.ParameterList}  # fmt: skip
    assert found.record.result["macs"] == lr.count(found.network, (1, 12, 12)).macs
    assert found.macs <= 0.5
    assert found.network.get_submodule("first").out_channels == 8  # meets others in a sum
    measured = lr.evaluate(found.network, stripes(), progress=False, device="cpu")
    assert measured.top1 == pytest.approx(found.record.result["top1"])


def test_a_resumed_run_learns_the_same_bits(tmp_path):
    def run(out: Path, **options) -> Learned:
        how = {"macs": 0.5, "epochs": 4, "out": out}
        return learn_shapes(small_net(), stripes(n=48), RECIPE, **how, **QUIET, **options)

    def stop(row, network) -> None:
        if row.epoch == 2:
            raise KeyboardInterrupt

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", callbacks=(stop,), checkpoint_every=0.0)
    parts = run(tmp_path / "parts", resume=True)
    again = run(tmp_path / "parts", resume=True)  # nothing is left to do
    with pytest.raises(lr.LowRankError, match=r"learns shapes with macs=0.5, not macs=0.4"):
        learn_shapes(small_net(), stripes(n=48), RECIPE, macs=0.4, out=tmp_path / "parts", resume=True, **QUIET)
    for other in (parts, again):
        assert other.shapes == whole.shapes
        for name, tensor in whole.network.state_dict().items():
            assert torch.equal(tensor, other.network.state_dict()[name]), name
    loaded = load_checkpoint(tmp_path / "whole", network=small_net()).network
    assert not has_learned(loaded)
    assert str(lr.load_shapes(tmp_path / "whole" / "shapes.json")) == str(whole.shapes)


@pytest.mark.parametrize(("batch", "images"), [(16, 16), (512, 128)])
def test_damage_is_measured_on_batches_of_at_most_128_images(batch: int, images: int):
    net = small_net()
    batches = list(learning_shapes._sample(stripes(n=1100), replace(RECIPE, batch_size=batch), 1, net))
    assert [len(targets) for _, targets in batches] == 8 * [images]


def test_the_best_weights_are_within_the_budget(tmp_path):
    learn_shapes(small_net(), stripes(n=48), RECIPE, macs=0.5, epochs=5, out=tmp_path, **QUIET)
    best = load_checkpoint(tmp_path, best=True, network=small_net()).network
    assert lr.count(best, (1, 12, 12)).macs <= 0.5 * lr.count(small_net(), (1, 12, 12)).macs


def test_accuracy_ends_no_run_before_shapes_are_final():
    recipe = replace(RECIPE, holdout=0.25, early_stop=1, min_delta=1.0)  # no epoch gains so much
    found = learn_shapes(small_net(), stripes(n=64), recipe, macs=0.5, epochs=5, **QUIET)
    assert found.macs <= 0.5
    assert len(found.record.history) == 5  # the first after epoch 3 is the best so far, the next ends the run


def test_a_run_that_a_callback_ends_too_early_is_refused():
    with pytest.raises(lr.LowRankError, match="ended after epoch 1, and shapes are final after epoch 3"):
        learn_shapes(small_net(), stripes(n=48), RECIPE, macs=0.5, epochs=5, callbacks=(lambda *_: True,), **QUIET)


def test_time_is_a_budget_too(tmp_path, monkeypatch: pytest.MonkeyPatch):
    model, timed = small_net(), []

    def keeping(shaped: nn.Module, dense: nn.Module, size: tuple[int, ...], **how: Any):
        timed.append((dense, how["batch"]))
        return time_costs(shaped, dense, size, **how)

    monkeypatch.setattr(shape_budget, "time_costs", keeping)
    found = learn_shapes(model, stripes(), RECIPE, latency=0.95, epochs=2, out=tmp_path, **QUIET)
    assert found.time is not None
    assert found.time <= 0.95
    assert (tmp_path / "shape_costs.json").exists()
    assert found.macs < 1
    assert timed[0][0] is not model  # that would move the user's model to the device
    assert timed[0][1] == 1  # a CPU is timed with one image
    (tmp_path / "shape_costs.json").write_text("{")
    with pytest.raises(lr.LowRankError, match="holds no costs of shapes"):
        learn_shapes(model, stripes(), RECIPE, latency=0.95, epochs=2, out=tmp_path, resume=True, **QUIET)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"macs": 0}, "above 0"),
        ({"macs": 2}, "up to 1"),
        ({"macs": float("nan")}, "not nan"),
        ({"macs": 0.001}, "below 0"),
        ({"latency": 0.9, "batch": 0}, "one or more, not 0"),
        ({}, "needs a budget"),
        ({"macs": 0.5, "latency": 0.5}, "one of"),
        ({"macs": 0.5, "shapes": ("none",)}, "needs shapes"),
        ({"macs": 0.5, "shapes": ("kx",)}, "filter shape"),
        ({"macs": 0.5, "epochs": 1}, "two epochs"),
        ({"macs": 0.5, "by": "gates"}, "by='gates' is not available: shapes are learned by=\"proximal\" alone"),
    ],
)
def test_a_bad_budget_gets_one_sentence(options, words):
    with pytest.raises(lr.LowRankError, match=words):
        learn_shapes(small_net(), stripes(n=8), RECIPE, **QUIET, **options)


def test_a_budget_that_is_refused_leaves_no_directory(tmp_path):
    with pytest.raises(lr.LowRankError, match="below"):
        learn_shapes(small_net(), stripes(n=8), RECIPE, macs=0.001, out=tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without it")
@pytest.mark.parametrize("budget", ["macs=0.6", "latency=0.9"])
def test_two_processes_learn_the_same_shapes(program, tmp_path, budget):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    process = program(tmp_path / "two", budget, launcher=launcher)
    _, complaints = process.communicate(timeout=600)
    assert process.returncode == 0, complaints
    two = driver.learn(tmp_path / "two", budget)  # nothing is left to do: it is read
    assert two.record.processes == 2
    if budget.startswith("macs"):
        assert two.macs <= 0.6
    x = torch.randn(2, 1, 8, 8)
    loaded = load_checkpoint(tmp_path / "two", network=driver.net()).network
    assert torch.equal(loaded.eval()(x), two.network.eval()(x))
