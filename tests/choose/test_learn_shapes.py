"""Filters learn their shapes: the right ones if they are known, within the budget, and the same when resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lowrank_cnn as lr
from lowrank_cnn.choose import learn_shapes as learning
from lowrank_cnn.choose.learn_shapes import COSTS, Learned, ShapeRun, time_costs
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.graph.finalize_shapes import has_learned
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import parse_scheme
from lowrank_cnn.train import Recipe
from lowrank_cnn.train.recipe import changed
from lowrank_cnn.train.trained import load_checkpoint
from tests.choose import driver
from tests.support import assert_equal_weights

RECIPE = Recipe(name="stripes", batch_size=16, epochs=10, lr=0.1, mirror=False, weight_decay=0.01)
OWN = Recipe(name="own", batch_size=8, epochs=3, lr=0.05, mirror=False)
ALL = ("kx1", "1xk", "1x1", "kxk", "none")
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
    """A short run; without a budget of its own within 0.6 of the MACs."""
    budget = {} if {"macs", "latency"} & options.keys() else {"macs": 0.6}
    how = {"data": stripes(n=24), "recipe": OWN, "shapes": ALL, "multiple": 4, **QUIET, **budget, **options}
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
    given: list[Any] = [net(), (1, 12, 12), None, {}, replace(RECIPE, batch_size=batch), stripes(n=1100)]
    batches = list(ShapeRun(*given, loss=nn.functional.cross_entropy).sample(1, net()))
    assert [len(targets) for _, targets in batches] == 8 * [images]


def test_accuracy_ends_no_run_before_shapes_are_final():
    recipe = replace(OWN, holdout=0.25, early_stop=1, min_delta=1.0)  # no epoch gains so much
    found = learn(recipe=recipe, data=stripes(n=64), epochs=5)
    assert found.macs <= 0.6
    assert len(found.record.history) == 5  # the first after epoch 3 is the best so far, the next ends the run


def test_time_is_a_budget_too_and_times_are_measured_once(tmp_path, monkeypatch: pytest.MonkeyPatch):
    model, timed = net(), []
    monkeypatch.setattr(learning, "time_costs", lambda *given: (timed.append(given), time_costs(*given))[1])
    how = {"latency": 0.95, "shapes": ALL[:-1], "epochs": 2, "out": tmp_path}
    found = learn(model, **how)
    assert found.time is not None
    assert found.time <= 0.95
    assert found.macs < 1
    assert timed[0][2].shape == (1, 1, 12, 12)  # a CPU is timed with one image
    assert learn(model, resume=True, **how).shapes == found.shapes
    assert len(timed) == 1
    kept = json.loads((tmp_path / COSTS).read_text())
    for text, words in (
        ("{", "holds no costs of shapes: remove it"),
        ('{"asked": {}, "costs": 3}', "holds no costs of shapes: remove it"),
        (json.dumps({**kept, "asked": {**kept["asked"], "latency": 0.5}}), "with latency=0.5, not latency=0.95"),
        (json.dumps({**kept, "asked": {**kept["asked"], "by": "gates"}}), "with by=gates, not by=proximal"),
        (json.dumps({**kept, "costs": {**kept["costs"], "filters": {}}}), "costs of another network"),
    ):
        (tmp_path / COSTS).write_text(text)
        with pytest.raises(lr.LowRankError, match=words):
            learn(model, resume=True, **how)
        with pytest.raises(lr.LowRankError, match="already holds a run"):
            learn(model, **how)
        assert (tmp_path / COSTS).read_text() == text
    learn(model, batch=3, **{**how, "latency": 0.9, "out": tmp_path / "new"})
    assert timed[-1][2].shape == (3, 1, 12, 12)


@pytest.mark.parametrize(
    ("times", "shares"),
    [
        ([0.6, 0.52, 0.505], [0.5, 0.5 / 0.6 * 0.5, 0.5 / 0.6 * 0.5 * 0.5 / 0.52]),
        ([0.9, 0.7, 0.8, 0.75], [0.5, 0.4, 0.32, 0.256, 0.4]),  # none is within the budget: the fastest is taken
    ],
)
def test_the_last_choice_is_made_for_less_if_the_network_takes_longer(tmp_path, monkeypatch, times, shares):
    asked: list[float] = []
    measured = iter([*times, 0.5])
    monkeypatch.setattr(ShapeRun, "time_of", lambda *_: next(measured))
    monkeypatch.setattr(learning.ShapeChooser, "least", lambda _: 0.0)
    choose = learning.ShapeChooser.choose
    monkeypatch.setattr(
        learning.ShapeChooser, "choose", lambda self, share: (asked.append(share), choose(self, share))
    )
    learn(latency=0.5, epochs=2, out=tmp_path)
    assert asked == pytest.approx(shares)
    assert json.loads((tmp_path / COSTS).read_text())["last_share"] == asked[-1]


def test_a_network_above_its_budget_of_time_says_so(capsys, monkeypatch):
    monkeypatch.setattr(ShapeRun, "time_of", lambda *_: 0.9)
    assert learn(latency=0.7, progress=True).time == 0.9
    said = capsys.readouterr().out
    assert said.startswith("Every shape in every layer is timed first.")
    assert "takes 0.90 of the dense network's time; the budget is 0.7" in said
    monkeypatch.setenv("RANK", "1")  # of several processes the first alone speaks
    learn(latency=0.7, progress=True)
    assert "the budget is" not in capsys.readouterr().out


def test_timing_draws_no_random_number():
    budget = learning.Budget("latency", 0.5)
    run = ShapeRun(net(), (1, 12, 12), budget, {}, OWN, stripes(n=24), nn.functional.cross_entropy, device="cpu")
    other, state = one_conv(), torch.get_rng_state()
    assert run.time_of(other) < 1
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed_through_optimize():
    found = lr.learn_shapes(net(), stripes(n=24), OWN, latency=0.9, batch=8, device="cuda", progress=False)
    assert found.time == pytest.approx(0.9, rel=0.5)


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


class Branching(nn.Module):
    """Its way depends on values, so that its graph cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if x.sum() > -1e9 else self.net(-x)


def test_a_network_that_cannot_be_captured_keeps_the_order_of_its_filters(capsys):
    found = learn(Branching(), latency=0.95, shapes=ALL[:-1], progress=True)
    assert "Filters keep their order" in capsys.readouterr().out
    assert found.macs is None
    assert found.time is not None


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


@pytest.mark.parametrize("budget", [{"macs": 0.6}, pytest.param({"latency": 0.999}, marks=pytest.mark.nightly)])
def test_a_head_that_runs_in_training_alone_keeps_its_filters(budget):
    found = learn(Guided(), shapes=ALL[:-1], **budget).network
    assert type(found.head[0]) is nn.Conv2d
    assert found.head[0].kernel_size == (3, 3)
    assert found.train()(torch.randn(2, 1, 8, 8)).shape == (2, 3)


def hooked() -> nn.Module:
    model = net()
    model.register_forward_hook(lambda *_: None)
    return model


def normed_in_groups() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 12), nn.Flatten())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"macs": 0}, "above 0"),
        ({"macs": 2}, "up to 1"),
        ({"macs": float("nan")}, "not nan"),
        ({"macs": None}, "needs a budget"),
        ({"macs": 0.5, "latency": 0.5}, "one of"),
        ({"macs": 0.001}, "all else cost: ask for more.$"),
        ({"macs": 0.1, "shapes": ALL[:-1]}, 'ask for more, or let filters go by the shape "none"'),
        ({"latency": 0.9, "batch": 0}, "whole number of at least 1, not 0"),
        ({"latency": 0.9, "batch": 2.5}, r"whole number of at least 1, not 2\.5"),
        ({"shapes": ("none",)}, "needs shapes"),
        ({"shapes": ("kx",)}, "filter shape"),
        ({"shapes": parse_scheme("lr")}, "shapes must be a list"),
        ({"epochs": 1}, "two epochs"),
        ({"by": "gates"}, "by='gates' is not available: shapes are learned by 'proximal' alone"),
        ({"recipe": changed(OWN, {"freeze": "backbone"})}, "it is frozen"),
        ({"model": net().to("meta")}, "on the meta device"),
        ({"model": "nin"}, "a model is an nn.Module"),
        ({"model": Branching(), "latency": 0.9}, r'no filters .* forward cannot be traced .* leave "none" out'),
        ({"model": hooked()}, "because hooks are registered on the network as a whole"),
        ({"model": normed_in_groups()}, "their channels meet others or reach the output"),
        (
            {"callbacks": (lambda *_: True,), "epochs": 5},
            "ended after epoch 1, and shapes are final after epoch 3",
        ),
        ({"out": __file__}, r"shape_costs\.json could not be written"),
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
