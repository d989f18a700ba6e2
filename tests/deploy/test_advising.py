"""The adviser measures, compares and says plainly what is better."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.deploy import advising
from lowrank_cnn.deploy.advising import design
from lowrank_cnn.system.clock import Sample


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


EXAMPLE = torch.randn(1, 3, 16, 16)


def clock(monkeypatch, cost) -> None:
    """A clock that tells what a network costs, in place of the time that it takes."""

    def times(self, networks, example):
        return {name: Sample(ms := cost(name, module), ms, ms, 3) for name, module in networks.items()}

    monkeypatch.setattr(advising.AdviceBench, "times", times)


def macs_of(module: nn.Module) -> float:
    return float(sum(p.numel() for p in module.parameters()))


def strips_in(module: nn.Module) -> int:
    return sum(isinstance(m, lr.CompositeConv2d) for m in module.modules())


def test_slow_strips_are_advised_against(monkeypatch):
    clock(monkeypatch, lambda name, m: macs_of(m) * (3 if strips_in(m) else 1))
    advice = design(net(), EXAMPLE, macs=0.4)
    assert advice.choice == "thinner"
    assert advice.verdict.startswith("Make it thinner instead")
    assert {row.choice for row in advice.layers} == {"thinner"}
    assert strips_in(advice.network) == 0
    assert advice.network(EXAMPLE).shape == (1, 4)


def test_fast_strips_are_advised(monkeypatch):
    clock(monkeypatch, lambda name, m: macs_of(m) * (0.5 if strips_in(m) else 1))
    advice = design(net(), EXAMPLE, macs=0.4)
    assert advice.choice == "low-rank"
    assert strips_in(advice.network) >= 1
    assert all(form.macs <= 0.4 for form in advice.forms if form.name != "dense")


def test_a_layer_where_strips_are_slow_is_left_out_of_the_mixture(monkeypatch):
    def cost(name, module):
        first = next(m for m in module.modules() if isinstance(m, nn.Conv2d | lr.CompositeConv2d))
        slow = isinstance(first, lr.CompositeConv2d) and first.in_channels == 3
        return macs_of(module) * (9 if slow else 0.5 if strips_in(module) else 1)

    clock(monkeypatch, cost)
    advice = design(net(), EXAMPLE, macs=0.4)
    assert [row.choice for row in advice.layers] == ["thinner", "low-rank"]
    assert "mixed" in {form.name for form in advice.forms}
    assert advice.choice != "thinner"
    assert isinstance(advice.network[0], nn.Conv2d)
    assert isinstance(advice.network[3], lr.CompositeConv2d)


def test_a_time_budget_is_kept(monkeypatch):
    monkeypatch.setattr(advising, "_STEPS", 2)
    clock(monkeypatch, lambda name, m: macs_of(m) * (2 if strips_in(m) else 1))
    advice = design(net(), EXAMPLE, latency=0.6)
    assert advice.choice == "thinner"
    chosen = next(form for form in advice.forms if form.name == "thinner")
    assert chosen.time <= 0.6


def test_with_data_what_is_lost_counts(monkeypatch):
    clock(monkeypatch, lambda name, m: macs_of(m))
    model = net()
    with torch.no_grad():
        model[3].weight[:, :, :, 0] = model[3].weight[:, :, :, 2] = 0  # upright already: strips lose nothing
    batches = [(torch.randn(8, 3, 16, 16), torch.arange(8) % 4)] * 2
    advice = design(model, EXAMPLE, macs=0.4, data=batches)
    row = {row.name: row for row in advice.layers}["3"]
    assert row.strips_lose == pytest.approx(0, abs=1e-9)
    assert row.choice == "low-rank"
    assert "would lose" in row.why


@pytest.mark.parametrize("engine", ["torch", "optimize"])
def test_real_times_are_measured(engine):
    advice = design(net(), EXAMPLE, macs=0.5, engine=engine, repeats=3)
    assert all(form.ms > 0 for form in advice.forms)
    assert advice.verdict in str(advice)
    assert advice.to_dict()["engine"] == engine


def test_a_precision_of_torch_is_that_of_the_example(monkeypatch):
    seen = []
    clock(monkeypatch, lambda name, m: seen.append(next(m.parameters()).dtype) or macs_of(m))
    advice = design(net(), EXAMPLE, macs=0.5, precision="bf16")
    assert "in torch, bfloat16" in advice.verdict
    assert torch.bfloat16 in seen


def test_int8_is_measured_in_an_engine(monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(advising.AdviceBench, "layers", lambda self, damage: ())
    advice = design(net(), EXAMPLE, macs=0.5, engine="onnx", precision="int8", repeats=3)
    assert "in onnx, int8" in advice.verdict


@pytest.mark.parametrize(
    ("options", "words"),
    [({"macs": 0.5, "precision": "int8"}, "name an engine for int8"),
     ({"macs": 0.5, "precision": "bf16", "engine": "onnx"}, "engines run in fp32, fp16, int8"),
     ({"macs": 0}, "above 0"), ({}, "needs a budget"), ({"macs": 0.5, "engine": "onxx"}, "did you mean onnx"),
     ({"macs": 1e-6}, "no form of this network")],
)  # fmt: skip
def test_bad_wishes_get_one_sentence(options, words):
    with pytest.raises(lr.LowRankError, match=words):
        design(net(), EXAMPLE, repeats=3, **options)
    with pytest.raises(lr.LowRankError, match="batch of images"):
        design(net(), EXAMPLE[0], macs=0.5)


def test_the_random_generator_stays_where_it_is(monkeypatch):
    clock(monkeypatch, lambda name, m: macs_of(m))
    model, before = net(), torch.get_rng_state()
    design(model, EXAMPLE, macs=0.5)
    assert torch.equal(torch.get_rng_state(), before)
