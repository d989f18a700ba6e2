"""One step: SGD, the moving average, auxiliary losses, and the halt at numbers that are not finite."""

from __future__ import annotations

import gc
import math
import weakref
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels.cuda_graph import Captured
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.step import GraphedStep, LossScale, TrainingStep
from tests.train.driver import batch, make_step, normed

CPU = torch.device("cpu")


def test_the_average_follows_the_weights():
    net = normed()
    step = make_step(net, Recipe(ema=0.5))
    images, labels = batch()
    expected = {name: t.clone() for name, t in net.state_dict().items()}
    for iteration in (100, 101, 102):  # late enough for the average to have its full length
        step.prepare(0.1, iteration)
        step(images, labels)
        for name, now in net.state_dict().items():
            expected[name] = (expected[name] + now) / 2 if now.is_floating_point() else now.clone()
    own = {name: t.clone() for name, t in net.state_dict().items()}
    with step.averaged():
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, expected[name])
    for name, value in net.state_dict().items():
        assert torch.equal(value, own[name])


def test_clipping_bounds_the_step():
    net = normed()
    before = {name: p.clone() for name, p in net.named_parameters()}
    step = make_step(net, Recipe(momentum=0, weight_decay=0, clip_norm=0.01))
    step.prepare(1.0, 0)
    step(*batch())
    moved = torch.cat([(p - before[name]).flatten() for name, p in net.named_parameters()]).norm()
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


def test_nothing_moves_once_a_gradient_is_not_finite():
    net = normed()
    step = make_step(net, Recipe(ema=0.9))
    images, labels = batch()
    step.prepare(0.1, 0)
    step(images, labels)
    before = {name: t.clone() for name, t in step.tensors().items() if name.startswith(("model.", "momentum."))}
    step(torch.full_like(images, float("inf")), labels)
    step(images, labels)
    tally = step.read_tally()
    assert tally.halted
    assert tally.steps == 1
    after = step.tensors()
    for name, value in before.items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(after[name], value), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_a_graph_computes_what_the_step_does(optimizer: str):
    results, recipe = [], Recipe(ema=0.9, optimizer=optimizer)
    for graphed in (False, True):
        net = normed().insert(3, nn.Dropout(0.5)).cuda()
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        step = TrainingStep(net, net, lambda loss: loss.backward(), recipe, torch.device("cuda"))
        images, labels = (t.cuda() for t in batch())
        torch.cuda.manual_seed(3)
        update = GraphedStep(step, images, labels) if graphed else step
        for iteration in range(4):
            step.prepare(0.1 / (iteration + 1), iteration)
            update(images * (1 + iteration), labels)
        results.append({name: t.clone() for name, t in step.tensors().items()})
    eager, replayed = results
    for name, tensor in eager.items():
        torch.testing.assert_close(replayed[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_a_graph_keeps_the_weights_alive_that_it_writes_to(monkeypatch):
    """A graph knows addresses alone: memory of freed weights would be given to others, and written over."""

    def captured(run, *, before_capture) -> Captured:
        before_capture()
        return Captured(Mock(), run)

    monkeypatch.setattr("lowrank_cnn.train.step.captured", captured)
    net = normed()
    update = GraphedStep(make_step(net, Recipe()), *batch())
    weight = weakref.ref(net[0].weight)
    del net
    gc.collect()
    assert weight() is not None
    del update
    gc.collect()
    assert weight() is None


def test_parts_of_a_batch_give_the_gradient_of_the_whole():
    """Without batch norm, which sees a part alone."""
    nets = [nn.Sequential(*(layer for layer in normed() if not isinstance(layer, nn.BatchNorm2d))) for _ in "ab"]
    images, labels = batch()
    for net, parts in zip(nets, (1, 4), strict=True):
        step = make_step(net, Recipe(batch_size=8, accumulate=parts, clip_norm=0.5, label_smoothing=0.1))
        for iteration in range(3):
            step.prepare(0.1, iteration)
            step(images, labels)
        assert step.read_tally().images == 24
        assert step.read_tally().steps == 3
    for name, value in nets[0].state_dict().items():
        torch.testing.assert_close(value, nets[1].state_dict()[name], rtol=1e-4, atol=1e-6)
    with pytest.raises(LowRankError, match="one tensor"):
        make_step(normed(), Recipe(batch_size=8, accumulate=2))(images, [labels])


def test_a_scaled_loss_gives_the_same_step_and_an_overflow_is_skipped():
    plain, scaled = normed(), normed()
    images, labels = batch()
    steps = [
        make_step(plain, Recipe()),
        TrainingStep(scaled, scaled, lambda loss: loss.backward(), Recipe(), CPU, scaled=True),
    ]
    for step in steps:
        step.prepare(0.1, 0)
        step(images, labels)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, scaled.state_dict()[name], rtol=1e-4, atol=1e-6)
    before = {name: value.clone() for name, value in scaled.named_parameters()}
    scale = steps[1].scaler.scale
    assert float(scale) == LossScale.FIRST
    scale.fill_(float("inf"))  # as where gradients overflow
    steps[1](images, labels)
    assert all(torch.equal(value, before[name]) for name, value in scaled.named_parameters())
    assert not steps[1].read_tally().halted


def test_the_scale_follows_overflows_and_good_steps():
    scale = LossScale(CPU)
    good, bad = torch.zeros(()), torch.ones(())
    scale.update(bad)
    assert float(scale.scale) == LossScale.FIRST / 2
    for _ in range(LossScale.GROW_AFTER):
        assert not scale.update(good)
    assert float(scale.scale) == LossScale.FIRST
    for _ in range(27):
        halted = scale.update(bad)
    assert halted  # it is the network that is not finite


def test_a_run_goes_on_in_fp16_after_another_precision(driver, tmp_path):
    driver.train(tmp_path, epochs=1, precision="fp32")
    _, record = driver.train(tmp_path, epochs=3, precision="fp16", resume=True)
    assert (record.precision, record.status) == ("fp16", "finished")
    assert math.isfinite(record.result["loss"])
