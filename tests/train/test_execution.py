"""The way that steps execute: measured, compared, kept in the record, the same when a run is resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lowrank_cnn.method.schemes import build_conv
from lowrank_cnn.models import create_model
from lowrank_cnn.train import step as execution
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.step import COMPILED, EAGER, StepBuilder, TrainingStep

CPU = torch.device("cpu")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 5, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5


class Scaled(nn.Module):
    """A network whose results a faulty compiler has changed."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor


class Stumbles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no rule for this operator\nand much more")


def chosen(monkeypatch, compiled: Callable[[nn.Module], nn.Module], speeds=(1.0, 0.5), steps_left=10_000):
    """Which way is taken, with what is said and the step, where trials take the given seconds."""
    net, said = network(), []
    step = TrainingStep(net, net, lambda loss: loss.backward(), Recipe(), CPU)
    measure, seconds = execution._time_steps, iter(speeds)
    way = StepBuilder({EAGER: net, COMPILED: compiled(net)}, graphs=False, say=said.append)
    with monkeypatch.context() as patch:
        patch.setattr(execution, "_time_steps", lambda *given: replace(measure(*given), seconds=next(seconds)))
        _, taken = way.fastest(step, *batch(), steps_left=steps_left)
    return taken.compiled, said, step


def test_the_faster_way_is_taken_and_said(monkeypatch):
    compiled, said, _ = chosen(monkeypatch, lambda net: net)
    assert compiled
    assert said == ["The network is compiled by torch: 500.0 ms a step compiled, 1000.0 ms without."]
    compiled, said, step = chosen(monkeypatch, lambda net: net, speeds=(1.0, 1.1))
    assert not compiled
    assert "no faster" in said[0]
    assert isinstance(step.forward, nn.Sequential)


def test_a_short_run_does_not_wait_for_the_compiler(monkeypatch):
    compiled, said, _ = chosen(monkeypatch, lambda net: Stumbles(), steps_left=100)
    assert (compiled, said) == (False, [])


def test_a_compiler_that_stumbles_or_errs_is_not_used(monkeypatch):
    compiled, said, step = chosen(monkeypatch, lambda net: Stumbles())
    assert (compiled, said) == (False, ["The network is not compiled: no rule for this operator."])
    assert not isinstance(step.forward, Stumbles)
    for factor in (1.5, float("nan")):
        compiled, said, _ = chosen(monkeypatch, lambda net, factor=factor: Scaled(net, factor))
        assert not compiled
        assert "differ" in said[0]


def test_a_choice_leaves_no_trace():
    net = network()
    step = TrainingStep(net, net, lambda loss: loss.backward(), Recipe(ema=0.9), CPU)
    step.prepare(0.1, 0)
    before, drawn = {name: t.clone() for name, t in step.tensors().items()}, torch.get_rng_state()
    StepBuilder({EAGER: net, COMPILED: net}, graphs=False, say=lambda _: None).fastest(
        step, *batch(), steps_left=10**9
    )
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.tensors().items())


def test_the_record_says_how_steps_ran_and_a_resumed_run_reads_it(driver, tmp_path):
    _, record = driver.train(tmp_path / "run", driver.PLAIN)
    assert record.execution == {"compiled": False, "cuda_graph": False}
    _, again = driver.train(tmp_path / "run", driver.PLAIN, epochs=4, resume=True)
    assert again.execution == record.execution


def test_a_compiled_run_is_the_run_without(driver, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda net, **_: compile(net, backend="aot_eager"))
    (plain, one), (compiled, other) = (driver.train(None, driver.PLAIN, compile=how) for how in (False, True))
    assert other.execution["compiled"]
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    assert other.result["loss"] == pytest.approx(one.result["loss"], rel=1e-4)


def low_rank_network(name: str) -> nn.Module:
    """One of our networks, or "chains": a layer of each scheme that makes a chain."""
    if name != "chains":
        return create_model(name, num_classes=5, width=0.1, norm="batch")
    convs = [build_conv(3, 8, 3, "lr-join"), build_conv(8, 8, 3, "separable")]
    blocks = [part for conv in convs for part in (conv, nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))]
    return nn.Sequential(*blocks, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, 5))


LARGE = [
    pytest.param(name, fused, marks=pytest.mark.nightly)
    for name in ("vgg11-gmp-lr-join", "googlenet-lr")
    for fused in (False, True)
]


@pytest.mark.parametrize(("name", "fused"), [("nin-c3-lr", True), ("chains", False), *LARGE])
def test_our_layers_have_no_graph_break(name, fused):
    from lowrank_cnn.graph.fuse import fuse

    torch.compiler.reset()  # classes of which other tests compiled many networks are no longer compiled
    net = low_rank_network(name).train()
    x = torch.randn(2, 3, 64, 64)

    def compiled() -> Any:  # a fused copy keeps the mode that the network has now
        return torch.compile(fuse(net) if fused else net, backend="aot_eager", fullgraph=True)

    net.eval()
    torch.testing.assert_close(compiled()(x), net(x), rtol=1e-4, atol=1e-5)
    net.train()
    found = compiled()(x)
    sum(part.sum() for part in (found if isinstance(found, tuple) else (found,))).backward()
    assert all(p.grad is not None for p in net.parameters())
