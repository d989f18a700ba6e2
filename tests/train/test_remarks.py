"""Warnings before a run: recipes that do not fit, and dropout in front of batch norm."""

from __future__ import annotations

import torch
from torch import nn

from lowrank_cnn.models import create_model
from lowrank_cnn.train import Recipe, fit, get_recipe
from lowrank_cnn.train.checks import (
    dropout_before_batch_norm,
    dropout_remarks,
    precision_remarks,
    remarks,
    rounding_remarks,
    step_remarks,
)


def test_drops_that_a_run_does_not_reach_are_said():
    network, recipe = nn.Linear(1, 1), get_recipe("nin-paper")
    assert remarks(network, recipe) == []
    assert "after 135 and 162 epochs; this run has 150" in remarks(network, get_recipe("nin-paper", epochs=150))[0]
    for schedule, said in (("cosine", 1), ("poly", 1), ("constant", 0)):
        assert len(remarks(network, get_recipe("nin-paper", schedule=schedule))) == said
    watched = get_recipe("vgg-paper", schedule="cosine")
    assert "levels divides the rate on top" in remarks(network, watched)[0]
    assert remarks(network, get_recipe("vgg-paper", schedule="cosine", levels=0)) == []


class Branches(nn.Module):
    """Dropout on a branch that no batch norm follows, which runs before the norm of the other branch."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.aside = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.5))
        self.main = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.drop, self.shared = nn.Dropout2d(0.1), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        aside = self.aside(x)
        return aside + self.main(self.drop(x) if self.shared else x)


def test_dropout_before_batch_norm_is_found_by_what_depends_on_what():
    assert dropout_before_batch_norm(Branches(shared=False), (3, 4, 4)) == []
    assert dropout_before_batch_norm(Branches(shared=True), (3, 4, 4)) == [("drop", "main.1")]
    assert dropout_before_batch_norm(Branches(shared=True), (3, 4, 4), rate=0.0) == []


def test_the_search_leaves_the_network_as_it_was():
    network = Branches(shared=True).eval()
    before, drawn = {k: v.clone() for k, v in network.state_dict().items()}, torch.get_rng_state()
    dropout_before_batch_norm(network, (3, 4, 4))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert torch.equal(drawn, torch.get_rng_state())
    assert not any(module.training or module._forward_hooks for module in network.modules())


def test_our_networks_have_no_dropout_before_batch_norm_unless_asked_for():
    modern = get_recipe("modern")
    for name in ("nin-c3-lr", "vgg11-gmp-lr"):
        network = create_model(name, num_classes=3, norm="batch", width=0.05)
        assert dropout_remarks(network, modern, (3, 32, 32)) == []
    asked = create_model("nin-c3-lr", norm="batch", width=0.05, dropout=0.5)
    [sentence] = dropout_remarks(asked, modern, (3, 32, 32))
    assert "'features.dropout1' stands before batch norm 'features.conv2_1_norm'" in sentence
    assert "--set dropout=0" in sentence
    assert dropout_remarks(asked, get_recipe("modern", dropout=0), (3, 32, 32)) == []


def test_the_papers_networks_keep_their_dropout():
    rates = {m.p for m in create_model("nin", width=0.05).modules() if isinstance(m, nn.Dropout)}
    assert rates == {0.5}


def test_fit_says_so(driver, capsys):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Dropout(0.5), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4)
    )
    fit(network, driver.tiny_data(), driver.PLAIN, epochs=1, device="cpu")
    assert "Dropout '1' stands before batch norm '2'" in capsys.readouterr().out


def test_half_precision_on_a_cpu_is_said_to_be_slow():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [bool(precision_remarks(name, cpu)) for name in ("fp32", "bf16", "fp16")] == [False, True, True]
    assert precision_remarks("fp16", gpu) == []


class Pooled(nn.Module):
    """An average pool as a module, and another as a function."""

    def __init__(self, *, function: bool) -> None:
        super().__init__()
        self.conv, self.pool, self.head = nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.Linear(4, 2)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.conv(x))
        x = nn.functional.adaptive_avg_pool2d(x, 1) if self.function else x.amax((2, 3), keepdim=True)
        return self.head(x.flatten(1))


def test_average_pools_that_int8_training_does_not_see_are_said():
    recipe = get_recipe("modern", quantize="int8")
    assert rounding_remarks(Pooled(function=False), recipe, (3, 8, 8)) == []
    assert rounding_remarks(Pooled(function=True), get_recipe("modern"), (3, 8, 8)) == []
    network = Pooled(function=True)
    [said] = rounding_remarks(network, recipe, (3, 8, 8))
    assert "Use nn.AvgPool2d or nn.AdaptiveAvgPool2d." in said
    assert all(module.training and not module._forward_hooks for module in network.modules())


def test_a_run_of_few_steps_is_told():
    (said,) = step_remarks(1, Recipe(name="short", batch_size=128, epochs=10))
    assert said.startswith("This run has 10 steps, 1 batch of 128 images in an epoch: a smaller --batch-size")
    assert step_remarks(4, Recipe(name="longer", batch_size=128, epochs=10)) == []
    assert step_remarks(1, Recipe(name="small", batch_size=16, epochs=10)) == []
