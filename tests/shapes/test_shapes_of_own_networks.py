"""Networks and data of the user's own learn shapes: frozen, tied, weight-normed, with several outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lowrank_cnn as lr
from lowrank_cnn.choose import learn_shapes as learning_shapes
from lowrank_cnn.choose.learn_shapes import Learned, learn_shapes
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.method.schemes import parse_scheme
from lowrank_cnn.train import Recipe
from lowrank_cnn.train.recipe import changed

RECIPE = Recipe(name="own", batch_size=8, epochs=3, lr=0.05, mirror=False)
ALL = ("kx1", "1xk", "1x1", "kxk", "none")
QUIET = {"progress": False, "device": "cpu", "multiple": 2}


def images(n: int = 24) -> Data:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 255, (n, 1, 8, 8), generator=draw, dtype=torch.uint8)
    split = ResidentSplit.of(pixels, torch.arange(n) % 3)
    return Data("noise", ("a", "b", "c"), split, split)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def learn(model: nn.Module, **options) -> Learned:
    return learn_shapes(
        model, **{"data": images(), "recipe": RECIPE, "macs": 0.6, "shapes": ALL, **QUIET, **options}
    )


def test_frozen_layers_keep_their_filters_and_stay_frozen():
    model = net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in ("0.weight", "0.bias", "3.bias", "4.weight", "10.weight"))
    found = learn(model).network
    assert torch.equal(found[0].weight, model[0].weight)
    assert torch.equal(found[0].bias, model[0].bias)
    assert len(found[3].bias) <= 16  # filters may go, and the others keep the bias that they had
    assert set(found[3].bias.tolist()) <= set(model[3].bias.tolist())
    frozen = {name for name, parameter in found.named_parameters() if not parameter.requires_grad}
    assert frozen == {"0.weight", "0.bias", "3.bias", "4.weight", "10.weight"}


def test_what_the_recipe_freezes_is_not_changed():
    model = net()
    found = learn(model, recipe=changed(RECIPE, {"freeze": "0.*, 10.*"})).network
    assert torch.equal(found[0].weight, model[0].weight)
    assert set(found[10].weight.flatten().tolist()) <= set(model[10].weight.flatten().tolist())
    assert all(parameter.requires_grad for parameter in (*model.parameters(), *found.parameters()))
    with pytest.raises(lr.LowRankError, match="it is frozen"):
        learn(net(), recipe=changed(RECIPE, {"freeze": "backbone"}))


def test_the_layer_that_whitens_keeps_its_filters():
    recipe = changed(RECIPE, {"whiten_first": True})
    found = learn(net(), recipe=recipe).network
    assert found[0].weight.shape == (8, 1, 3, 3)
    plain = net()
    lr.fit(plain, images(), recipe, progress=False, device="cpu")
    assert torch.equal(found[0].weight, plain[0].weight)  # whitening depends on the images alone


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


def test_a_network_that_cannot_be_captured_is_not_thinned_and_says_so(capsys):
    model = Branching()
    with pytest.raises(
        lr.LowRankError, match=r'no filters .* because its forward cannot be traced .* leave "none" out'
    ):
        learn(model, macs=None, latency=0.9)
    found = learn(model, macs=None, latency=0.95, shapes=ALL[:-1], progress=True)
    assert "Filters keep their order" in capsys.readouterr().out
    assert found.macs is None
    assert found.time is not None
    hooked = net()
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(lr.LowRankError, match="because hooks are registered on the network as a whole"):
        learn(hooked)


def test_a_network_above_its_budget_of_time_says_so(capsys, monkeypatch):
    monkeypatch.setattr(learning_shapes.ShapeBudget, "time_of", lambda *_: 0.9)
    assert learn(net(), macs=None, latency=0.7, progress=True).time == 0.9
    said = capsys.readouterr().out
    assert said.startswith("Every shape in every layer is timed first.")
    assert "takes 0.90 of the time, and 0.7 was asked for" in said
    monkeypatch.setenv("RANK", "1")  # of several processes the first alone speaks
    learn(net(), macs=None, latency=0.7, progress=True)
    assert "of the time" not in capsys.readouterr().out


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.edges = net(), nn.Conv2d(1, 8, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"classes": self.net(x), "edges": self.edges(x)}


def test_damage_is_measured_on_the_output_that_the_recipe_names():
    assert learn(TwoOutputs(), recipe=changed(RECIPE, {"output": "classes"})).macs <= 0.6


def test_a_loader_decides_the_batch_and_options_change_the_recipe():
    pairs = TensorDataset(torch.randn(20, 1, 8, 8), torch.arange(20, dtype=torch.int32) % 3)
    assert learn(net(), data=DataLoader(pairs, batch_size=5)).record.recipe["batch_size"] == 5
    recipe = learn(net(), batch_size=6, lr=0.01).record.recipe
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


@pytest.mark.parametrize("way", [{}, {"macs": None, "latency": 0.999}])
def test_a_head_that_runs_in_training_alone_keeps_its_filters(way):
    found = learn(Guided(), shapes=("kx1", "1xk", "1x1", "kxk"), **way).network
    assert type(found.head[0]) is nn.Conv2d
    assert found.head[0].kernel_size == (3, 3)
    assert found.train()(torch.randn(2, 1, 8, 8)).shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": net().to("meta")}, "on the meta device"),
        ({"model": "nin"}, "a model is an nn.Module"),
        ({"shapes": parse_scheme("lr")}, "shapes are a list like"),
        ({"macs": None, "latency": 0.9, "batch": 2.5}, r"one or more, not 2\.5"),
        ({"out": __file__}, r"shape_costs\.json could not be written"),
        ({"macs": 0.001}, "all else cost: ask for more.$"),
    ],
)
def test_what_cannot_be_done_gets_one_sentence(options, words):
    with pytest.raises(lr.LowRankError, match=words):
        learn(**{"model": net(), **options})


def test_a_run_does_not_lie_among_its_images(tmp_path: Path):
    with pytest.raises(lr.LowRankError, match="holds the images to train on"):
        learn(net(), data=str(tmp_path), out=tmp_path)
