"""The forms that `optimize` tries, and which it leaves out."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.clock import Sample
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.optimize import Form, Optimized, Workshop, best_form
from lowrank_cnn.graph.capture import layer_kind
from lowrank_cnn.kernels.device import is_for_graphs
from lowrank_cnn.method.schemes import build_conv

IMAGE = torch.randn(2, 3, 30, 30, generator=torch.Generator().manual_seed(1))
COMPILED = "folded, compiled, recorded"


def workshop(net: nn.Module, *, budget: float = 60.0) -> Workshop:
    return Workshop(net, (IMAGE,), False, 3, budget)


@pytest.mark.parametrize(("plan", "best"), [(1.0, "fused, recorded"), (0.9, "planned, recorded")])
def test_a_plan_is_taken_where_it_is_clearly_faster(plan: float, best: str):
    assert best_form({"as given": 3.0, "fused, recorded": 1.005, "planned, recorded": plan}) == best
    assert best_form({"as given": 3.0, "planned, contiguous": plan}) == "planned, contiguous"


def test_what_is_fused_whole_computes_the_same_and_leaves_the_network_alone(monkeypatch: pytest.MonkeyPatch):
    stem = [build_conv(3, 8, 3, "lr"), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2, 1)]
    net = nn.Sequential(*stem, nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    before = [type(module) for module in net.modules()]
    monkeypatch.setattr("lowrank_cnn.deploy.block_forms._on_cpu", lambda layer: False)
    fast = workshop(net).fused
    kinds = {type(module).__name__ for module in fast.modules()}
    assert {"FusedBlock", "FusedPool", "FusedResponseNorm"} <= kinds
    assert not {"Conv2d", "MaxPool2d", "LocalResponseNorm"} & kinds
    torch.testing.assert_close(fast(IMAGE), net(IMAGE), rtol=1e-4, atol=1e-5)
    assert [type(module) for module in net.modules()] == before


class Sums(nn.Module):
    """A forward that decides by a value cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if x.sum() > 0 else -self.conv(x)


def test_what_cannot_be_captured_is_not_fused():
    with pytest.raises(LowRankError, match="nothing is fused"):
        _ = workshop(Sums().eval()).fused


def test_on_a_gpu_chains_are_also_tried_as_dense_convs():
    name = "merged, compiled, recorded"
    net = nn.Sequential(build_conv(3, 8, 3, "lr-join"), nn.BatchNorm2d(8), nn.ReLU()).eval()
    merged = workshop(net)._on_gpu()[name][0]()
    assert not any(layer_kind(part) == "chain" for part in merged.modules())
    torch.testing.assert_close(merged(IMAGE), net(IMAGE), rtol=1e-4, atol=1e-4)
    assert name not in workshop(nn.Sequential(nn.Conv2d(3, 8, 3)).eval())._on_gpu()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """A workshop that takes its forms for those of a GPU; its one form takes a millisecond."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    work = workshop(net)
    work.made["fused, recorded"] = Optimized(net, Form())
    monkeypatch.setattr(Workshop, "times", lambda self, repeats: {name: Sample(1, 1, 1, 3) for name in self.made})
    return work


def put_layers(monkeypatch: pytest.MonkeyPatch, ms: float) -> list[object]:
    asked: list[object] = []

    def time_layers(network: nn.Module, *inputs: Tensor) -> float:
        asked.append(network)
        return ms

    monkeypatch.setattr("lowrank_cnn.deploy.optimize.time_layers", time_layers)
    return asked


def test_the_compiler_is_left_out_where_its_layers_alone_take_longer(on_gpu: Workshop, monkeypatch):
    asked = put_layers(monkeypatch, 1.3)
    reason = on_gpu._out_of_reach(COMPILED)
    assert reason == "not tried: its layers alone take 1.3 ms, and fused, recorded takes 1 ms"
    assert on_gpu._out_of_reach("folded, compiled") == reason
    assert len(asked) == 1, "layers are timed once"
    assert not any(isinstance(part, nn.BatchNorm2d) for part in asked[0].modules())  # type: ignore[attr-defined]


def test_the_compiler_is_tried_where_it_might_win(on_gpu: Workshop, monkeypatch):
    put_layers(monkeypatch, 1.2)
    assert on_gpu._out_of_reach(COMPILED) == ""


def test_the_compiler_is_tried_where_layers_cannot_be_timed(on_gpu: Workshop, monkeypatch):
    def fails(network: nn.Module, *inputs: Tensor) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("lowrank_cnn.deploy.optimize.time_layers", fails)
    assert on_gpu._out_of_reach(COMPILED) == ""


@pytest.mark.parametrize("name", ["folded, recorded", "fused, compiled, recorded", "planned, recorded", "folded"])
def test_other_forms_are_always_tried(on_gpu: Workshop, monkeypatch, name: str):
    assert put_layers(monkeypatch, 100.0) == []
    assert on_gpu._out_of_reach(name) == ""


@pytest.mark.parametrize("fast", ["contiguous", "channels_last"])
def test_on_a_cpu_the_faster_memory_format_is_planned_first(monkeypatch: pytest.MonkeyPatch, fast: str):
    work, tried = workshop(nn.Sequential(nn.Conv2d(3, 4, 3)).eval()), []

    def attempt(self: Workshop, name: str) -> None:
        tried.append(name)
        self.made[name] = Optimized(self.model, Form())

    def times(self: Workshop, repeats: int) -> dict[str, Sample]:
        return {name: Sample(ms, ms, ms, 0) for name in self.made for ms in [1.0 if fast in name else 2.0]}

    monkeypatch.setattr(Workshop, "attempt", attempt)
    monkeypatch.setattr(Workshop, "times", times)
    assert work.fastest(compile=False).report.choice == f"folded, {fast}"
    assert tried[:3] == ["as given", "folded, contiguous", "folded, channels_last"]
    assert tried[3] == f"planned, {fast}"
    assert len(tried) == 5


def test_no_form_is_begun_at_the_end_of_the_budget(monkeypatch: pytest.MonkeyPatch):
    work = workshop(nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), budget=10.0)
    now = SimpleNamespace(perf_counter=lambda: work.began + 8.5)
    monkeypatch.setattr("lowrank_cnn.deploy.optimize.time", now)
    work.attempt_in_time("folded, contiguous")
    work.attempt_in_time("as given")
    assert set(work.made) == {"as given"}
    assert "used up" in work.failed["folded, contiguous"]


def test_a_form_that_is_not_ready_in_time_is_stopped(monkeypatch: pytest.MonkeyPatch):
    """A compiler cannot be asked to stop: `optimize(budget=30)` took 226 seconds."""
    work = workshop(nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), budget=0.5)
    monkeypatch.setattr(Workshop, "folded", lambda self, layout: time.sleep(600))
    assert work.fastest(compile=False).report.choice == "as given"
    assert work.failed["folded, contiguous"] == "stopped: the budget of 0.5 s was used up"
    assert "not tried" in work.failed["planned, channels_last"]


def test_our_kernels_are_compiled_around_only_while_half_of_the_budget_is_left(on_gpu: Workshop, monkeypatch):
    now = SimpleNamespace(perf_counter=lambda: on_gpu.began + 0.6 * on_gpu.budget)
    monkeypatch.setattr("lowrank_cnn.deploy.optimize.time", now)
    tried: list[str] = []
    monkeypatch.setattr(Workshop, "attempt", lambda self, name: tried.append(name))
    for name in ("fused, compiled, recorded", "folded, compiled, recorded"):
        on_gpu.attempt_in_time(name)
    assert tried == ["folded, compiled, recorded"]
    assert "used up" in on_gpu.failed["fused, compiled, recorded"]


def test_on_a_gpu_kernels_are_compiled_together_before_a_form_runs(on_gpu: Workshop, monkeypatch):
    surveyed: list[bool] = []

    def prepare(run) -> None:
        surveyed.append(is_for_graphs())
        assert run().shape == (2, 8, 28, 28)

    monkeypatch.setattr("lowrank_cnn.deploy.optimize.prepare", prepare)
    monkeypatch.setattr(Workshop, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(Optimized, "prepare", lambda self, *inputs: self)
    on_gpu.attempt("folded, recorded")
    on_gpu.attempt("folded")
    on_gpu.attempt(COMPILED)
    assert surveyed == [True, False], "the compiler compiles for itself"
