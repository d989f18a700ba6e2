"""Filters learn their shapes: the right ones if they are known, within the budget, and the same when resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lowrank_cnn as lr
from lowrank_cnn.choose.learn_shapes import ASKED, Learned, ShapeRun
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.graph.finalize_shapes import has_learned
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import parse_scheme
from lowrank_cnn.train import Recipe
from lowrank_cnn.train.recipe import changed
from lowrank_cnn.train.trained import load_checkpoint
from tests.choose import driver
from tests.support import assert_equal_weights
from tests.train.driver import tiny_net

RECIPE = Recipe(name="stripes", batch_size=16, epochs=10, lr=0.1, mirror=False, weight_decay=0.01)
OWN = Recipe(name="own", batch_size=8, epochs=3, lr=0.05, mirror=False)
ALL = ("kx1", "1xk", "1x1", "kxk")
QUIET = {"progress": False, "device": "cpu"}


def stripes(*, vertical: bool = False, n: int = 128) -> Data:
    """Images whose rows (or columns) are waves that begin anywhere; the class is the length of the wave.

    Half of each row is bright, and rows do not depend on each other: only taps along a row tell classes apart.
    """

    def split(count: int, seed: int) -> ResidentSplit:
        draw = torch.Generator().manual_seed(seed)
        labels = torch.arange(count) % 3
        places = torch.randint(0, 12, (count, 12, 1), generator=draw) + torch.arange(12)
        images = (places // (1 + labels)[:, None, None] % 2)[:, None].to(torch.uint8) * 200
        images = images.transpose(2, 3) if vertical else images
        return ResidentSplit.of(images.contiguous(), labels)

    return Data("stripes", ("one", "two", "three"), split(n, 0), split(48, 1))


def one_conv(classes: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)]
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), *head)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def learn(model: nn.Module | None = None, **options: Any) -> Learned:
    """A short run within 0.6 of the MACs."""
    how = {"data": stripes(n=24), "recipe": OWN, "shapes": ALL, "multiple": 4, "macs": 0.6, **QUIET, **options}
    return lr.learn_shapes(net() if model is None else model, **how)


@pytest.mark.nightly
def test_strips_longer_than_the_kernel_are_taken_if_they_serve():
    def split(seed: int) -> ResidentSplit:
        draw = torch.Generator().manual_seed(seed)
        labels = torch.arange(256) % 2
        bits = torch.randint(0, 2, (256, 12, 4), generator=draw)
        flip = torch.randint(0, 2, (256, 12, 4), generator=draw)
        far = torch.where(labels[:, None, None] == 1, bits, flip)  # four columns on: the same bits, or others
        images = torch.cat([bits, far, bits], 2)[:, None].to(torch.uint8) * 200
        return ResidentSplit.of(images.contiguous(), labels)

    images, recipe = Data("far", ("other", "same"), split(0), split(1)), replace(RECIPE, weight_decay=0.02)
    shapes = ("1x3", "1x5", "5x1", "kxk")
    found = lr.learn_shapes(one_conv(2), images, recipe, macs=0.56, shapes=shapes, **QUIET)
    assert dict(found.shapes.layers["0"].shapes).get("1x5", 0) >= 4


@pytest.mark.parametrize(
    ("vertical", "shape"), [(False, "1x3"), pytest.param(True, "3x1", marks=pytest.mark.nightly)]
)
def test_most_filters_become_rows_if_images_are_stripes(vertical, shape):
    recipe = replace(RECIPE, weight_decay=0.1)  # which lets taps that tell nothing vanish
    images = stripes(vertical=vertical, n=256)
    found = lr.learn_shapes(one_conv(), images, recipe, macs=0.345, shapes=("kx1", "1xk", "kxk"), **QUIET)
    assert dict(found.shapes.layers["0"].shapes)[shape] >= 6
    assert found.macs <= 0.345  # strips alone are within the budget


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


def test_the_result_is_plain_and_computes_what_was_trained():
    found = learn(Residual(), data=stripes(), macs=0.5, epochs=4)
    assert not has_learned(found.network)
    assert {type(m) for m in found.network.modules()} <= {Residual, nn.Conv2d, CompositeConv2d, nn.BatchNorm2d,
                                                          nn.Linear, nn.ParameterList}  # fmt: skip
    assert found.record.result["macs"] == lr.count(found.network, (1, 12, 12)).macs
    assert found.macs <= 0.5
    assert found.network.get_submodule("first").out_channels == 8  # meets others in a sum
    measured = lr.evaluate(found.network, stripes(), progress=False, device="cpu")
    assert measured.top1 == pytest.approx(found.record.result["top1"])


def test_a_resumed_run_learns_the_same_bits(tmp_path):
    def run(out: str, **options: Any) -> Learned:
        return learn(macs=0.5, epochs=4, out=tmp_path / out, **options)

    def stop(row, network) -> None:
        if row.epoch == 2:
            raise KeyboardInterrupt

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("parts", callbacks=(stop,), checkpoint_every=0.0)
    parts = run("parts", resume=True)
    again = run("parts", resume=True)  # nothing is left to do
    for other in (parts, again):
        assert other.shapes == whole.shapes
        assert_equal_weights(whole.network, other.network)
    for best in (False, True):  # the best weights are within the budget too
        loaded = load_checkpoint(tmp_path / "whole", best=best, network=net()).network
        assert not has_learned(loaded)
        assert lr.count(loaded, (1, 12, 12)).macs <= 0.5 * lr.count(net(), (1, 12, 12)).macs
    assert str(lr.load_shapes(tmp_path / "whole" / "shapes.json")) == str(whole.shapes)


@pytest.mark.parametrize(("batch", "images"), [(16, 16), (512, 128)])
def test_damage_is_measured_on_batches_of_at_most_128_images(batch: int, images: int):
    given: list[Any] = [{}, None, 0.5, replace(RECIPE, batch_size=batch), stripes(n=1100)]
    batches = list(ShapeRun(*given, loss=nn.functional.cross_entropy).sample(1, net()))
    assert [len(targets) for _, targets in batches] == 8 * [images]


def test_accuracy_ends_no_run_before_shapes_are_final():
    recipe = replace(OWN, holdout=0.25, early_stop=1, min_delta=1.0)  # no epoch gains so much
    found = learn(recipe=recipe, data=stripes(n=64), epochs=5)
    assert found.macs <= 0.6
    assert len(found.record.history) == 5  # the first after epoch 3 is the best so far, the next ends the run


def test_a_run_is_resumed_with_the_same_request(tmp_path):
    how = {"epochs": 2, "out": tmp_path}
    found = learn(**how)
    assert learn(resume=True, **how).shapes == found.shapes
    for options, words in (({"macs": 0.7}, "with macs=0.6, not macs=0.7"), ({"multiple": 2}, "multiple=2")):
        with pytest.raises(lr.LowRankError, match=words):
            learn(resume=True, **options, **how)
    with pytest.raises(lr.LowRankError, match="already holds a run"):
        learn(**how)
    (tmp_path / ASKED).write_text("{")
    with pytest.raises(lr.LowRankError, match="is damaged"):
        learn(resume=True, **how)


def test_frozen_layers_keep_their_filters_and_stay_frozen():
    model = net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in ("0.weight", "0.bias", "3.bias", "4.weight", "10.weight"))
    found = learn(model).network
    assert torch.equal(found[0].weight, model[0].weight)
    assert torch.equal(found[0].bias, model[0].bias)
    assert len(found[3].bias) <= 8  # filters may go, and the others keep the bias that they had
    assert set(found[3].bias.tolist()) <= set(model[3].bias.tolist())
    frozen = {name for name, parameter in found.named_parameters() if not parameter.requires_grad}
    assert frozen == {"0.weight", "0.bias", "3.bias", "4.weight", "10.weight"}


def test_layers_that_the_recipe_freezes_or_whitens_keep_their_filters():
    model = net()
    found = learn(model, recipe=changed(OWN, {"freeze": "0.*, 10.*"})).network
    assert torch.equal(found[0].weight, model[0].weight)
    assert set(found[10].weight.flatten().tolist()) <= set(model[10].weight.flatten().tolist())
    assert all(parameter.requires_grad for parameter in (*model.parameters(), *found.parameters()))
    white, plain = changed(OWN, {"whiten_first": True}), net()
    lr.fit(plain, stripes(n=24), white, progress=False, device="cpu")
    assert torch.equal(learn(recipe=white).network[0].weight, plain[0].weight)  # by the images alone


class Tied(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.one, self.two, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.b(torch.relu(self.a(x)))).mean((2, 3))
        return self.last(torch.relu(self.two(torch.relu(self.one(x)))))


def test_layers_that_share_a_weight_go_on_sharing_it():
    found = learn(Tied()).network
    assert found.one.weight is found.two.weight


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.edges = net(), nn.Conv2d(1, 8, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"classes": self.net(x), "edges": self.edges(x)}


def test_damage_is_measured_on_the_output_that_the_recipe_names():
    assert learn(TwoOutputs(), recipe=changed(OWN, {"output": "classes"})).macs <= 0.6


def test_a_loader_decides_the_batch_and_options_change_the_recipe():
    pairs = TensorDataset(torch.randn(20, 1, 8, 8), torch.arange(20, dtype=torch.int32) % 3)
    assert learn(data=DataLoader(pairs, batch_size=5)).record.recipe["batch_size"] == 5
    recipe = learn(batch_size=6, lr=0.01).record.recipe
    assert (recipe["batch_size"], recipe["lr"]) == (6, 0.01)


def test_other_layers_do_not_stop_a_run():
    normed, deep = net(), nn.Sequential(nn.Unflatten(1, (1, 1)), nn.Conv3d(1, 1, 3, padding=1), nn.Flatten(1, 2))
    normed[3] = torch.nn.utils.weight_norm(normed[3])  # of the older kind, which cannot be copied
    assert learn(normed, macs=0.9).macs <= 0.9
    assert learn(nn.Sequential(deep, *net())).macs <= 0.6


class Guided(nn.Module):
    """Has a head that runs in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rest = nn.Conv2d(1, 1, 1), net()
        self.head = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.rest(x) + self.head(x) if self.training else self.rest(x)


def test_a_head_that_runs_in_training_alone_keeps_its_filters():
    found = learn(Guided()).network
    assert type(found.head[0]) is nn.Conv2d
    assert found.head[0].kernel_size == (3, 3)
    assert found.train()(torch.randn(2, 1, 8, 8)).shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"macs": 0}, "above 0"),
        ({"macs": 2}, "at most 1"),
        ({"macs": float("nan")}, "not nan"),
        ({"macs": None}, "needs a budget"),
        ({"macs": 0.001}, "all else cost: ask for more.$"),
        ({"shapes": ("kx",)}, "filter shape"),
        ({"shapes": parse_scheme("lr")}, "shapes must be a list"),
        ({"epochs": 1}, "two epochs"),
        ({"recipe": changed(OWN, {"freeze": "backbone"})}, "it is frozen"),
        ({"model": net().to("meta")}, "on the meta device"),
        ({"model": "nin"}, "a model is an nn.Module"),
        (
            {"callbacks": (lambda *_: True,), "epochs": 5},
            "ended after epoch 1, and shapes are final after epoch 3",
        ),
        ({"out": __file__}, r"shape_budget\.json could not be written"),
    ],
)
def test_impossible_requests_get_one_sentence(options, words):
    with pytest.raises(lr.LowRankError, match=words):
        learn(**options)


def test_a_refused_run_leaves_no_directory(tmp_path: Path):
    with pytest.raises(lr.LowRankError, match="below"):
        learn(macs=0.001, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(lr.LowRankError, match="holds the images to train on"):
        learn(data=str(tmp_path), out=tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without it")
def test_two_processes_learn_the_same_shapes(program, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    process = program(tmp_path / "two", launcher=launcher)
    _, complaints = process.communicate(timeout=600)
    assert process.returncode == 0, complaints
    two = driver.learn(tmp_path / "two")  # nothing is left to do: it is read
    assert two.record.processes == 2
    assert two.macs <= 0.6
    x = torch.randn(2, 1, 8, 8)
    loaded = load_checkpoint(tmp_path / "two", network=tiny_net(stateful=True)).network
    assert torch.equal(loaded.eval()(x), two.network.eval()(x))
