"""The adviser measures, compares and says plainly what is better."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.choose import design as advising
from lowrank_cnn.choose.design import design, layer_advice
from lowrank_cnn.core.clock import Sample


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


EXAMPLE = torch.randn(1, 3, 16, 16)


def clock(monkeypatch, cost) -> None:
    """A clock that tells what a network costs, in place of the time that it takes."""

    def times(networks, example, **_):
        return {name: Sample(ms := cost(name, module), ms, ms, 3) for name, module in networks.items()}

    monkeypatch.setattr(advising, "times", times)


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


def test_it_is_said_why_no_thinner_network_was_measured(monkeypatch):
    clock(monkeypatch, lambda name, m: macs_of(m))
    fixed = net()
    fixed[1] = nn.RMSNorm([16, 16, 16])  # has a weight for each value of the 16 maps
    verdict = design(fixed, EXAMPLE, macs=0.5).verdict
    assert verdict.startswith("Take low-rank filters.")
    assert "No thinner network was measured: the network cannot be made thinner" in verdict


def test_fast_strips_are_advised(monkeypatch):
    clock(monkeypatch, lambda name, m: macs_of(m) * (0.5 if strips_in(m) else 1))
    advice = design(net(), EXAMPLE, macs=0.4)
    assert advice.choice == "low-rank"
    assert strips_in(advice.network) >= 1
    assert all(form.macs <= 0.4 for form in advice.forms if form.name != "dense")


def test_forms_that_are_no_faster_are_not_advised(monkeypatch):
    clock(monkeypatch, lambda name, m: 1.0 if name == "dense" else 1.2)
    model = net()
    advice = design(model, EXAMPLE, macs=0.4)
    assert advice.choice == "dense"
    assert advice.verdict.startswith("Leave it as it is")
    assert advice.network is not model
    assert torch.equal(advice.network[0].weight, model[0].weight)


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
    monkeypatch.setattr(advising, "advise_layers", lambda *_: ())
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


def test_examples_that_do_not_fit_get_one_sentence():
    for example in (EXAMPLE[0], EXAMPLE.byte(), [1.0]):
        with pytest.raises(lr.LowRankError, match="batch of images"):
            design(net(), example, macs=0.5)
    with pytest.raises(lr.LowRankError, match="does not take an example of 1x3x4x4: "):
        design(nn.Sequential(net()[0], nn.Flatten(), nn.Linear(8, 2)), EXAMPLE[..., :4, :4], macs=0.5)
    with pytest.raises(lr.LowRankError, match="on the meta device nothing takes time"):
        design(net().to("meta"), EXAMPLE, macs=0.5)


def test_the_advised_network_is_ready_to_be_trained(monkeypatch):
    """In the dtype and the modes of the model, whatever was measured, and without frozen weights."""
    clock(monkeypatch, lambda name, m: macs_of(m) * (0.5 if strips_in(m) else 1))
    model = net().requires_grad_(False)
    advice = design(model, EXAMPLE, macs=0.5, precision="bf16")
    assert advice.choice == "low-rank"
    assert {p.dtype for p in advice.network.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in advice.network.parameters())
    assert not any(p.requires_grad for p in model.parameters())
    assert advice.network.training


def test_a_network_that_has_no_cheaper_form_says_why():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x) if x.sum() > -1e9 else x

    with pytest.raises(lr.LowRankError, match=r"reaches macs=0.5 here: .* without values"):
        design(Looks(), EXAMPLE, macs=0.5, repeats=3)


def test_a_network_with_3d_convs_and_older_weight_norm_is_measured():
    deep = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 1, 3, padding=1), nn.Flatten(1, 2), *net())
    assert len(design(deep, EXAMPLE, macs=0.5, repeats=3).layers) == 2
    model = net()
    model[3] = torch.nn.utils.weight_norm(model[3])
    with pytest.raises(lr.LowRankError, match="cannot be made thinner"):
        design(model, EXAMPLE, macs=0.5, repeats=3)


def test_the_faster_form_is_advised():
    times = {"dense": 1.0, "strips": 0.5, "thin": 0.4}
    assert layer_advice("a", times).choice == "thinner"
    assert layer_advice("a", {**times, "strips": 0.3}).choice == "low-rank"
    assert layer_advice("a", {**times, "strips": 0.3, "thin, rounded up": 0.2}).choice == "thinner"
