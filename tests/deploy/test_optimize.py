"""`lr.optimize` finds the fastest form of a network, writes it to a file, and makes it again without measuring."""

from __future__ import annotations

import copy
import io
import json
import time
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lowrank_cnn.core import search as searching
from lowrank_cnn.core.clock import Sample
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.deploy import blocks
from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.deploy.optimize import (
    FOLDED,
    FUSED,
    LAST,
    MERGED,
    ON_GPU,
    Form,
    FormSearch,
    Optimized,
    freezes,
    optimize,
    reoptimize,
)
from lowrank_cnn.deploy.plan import open_times, plan
from lowrank_cnn.graph.capture import layer_kind
from lowrank_cnn.kernels.device import is_for_graphs
from lowrank_cnn.method.schemes import build_conv
from lowrank_cnn.models import create_model

IMAGE = torch.randn(2, 3, 30, 30, generator=torch.Generator().manual_seed(1))
QUICKLY = {"compile": False, "cache": False, "repeats": 3}


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    parts = OrderedDict(
        first=build_conv(3, 8, 3, "lr-join"), norm=nn.BatchNorm2d(8), relu=nn.ReLU(), pool=nn.MaxPool2d(2),
        second=build_conv(8, 8, 3, "lr"), act=nn.ReLU(), mean=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(),
        head=nn.Linear(8, 10),
    )  # fmt: skip
    net = nn.Sequential(parts).eval()
    nn.init.uniform_(net.norm.running_var, 0.5, 2)
    return net


def assert_same(ours: nn.Module, right: nn.Module, x: Tensor = IMAGE) -> None:
    torch.testing.assert_close(ours(x), right(x), rtol=1e-4, atol=1e-4)


def test_the_result_computes_the_same_and_says_how(network: nn.Module):
    said: list[str] = []
    fast = optimize(network, IMAGE, **QUICKLY, say=said.append)
    assert_same(fast, network)
    assert notes(fast).input_size == (3, 30, 30)
    times = fast.report.times
    assert set(times) == {
        "as given", "folded, contiguous", "planned, contiguous", "folded, channels_last", "planned, channels_last"
    }  # fmt: skip
    assert times[fast.report.choice].ms == min(sample.ms for sample in times.values()) <= times["as given"].ms
    assert json.dumps(fast.report.to_dict())
    blocks = [d.name for d in notes(plan(network, IMAGE, cache=False, repeats=3)).plan.decisions]
    for layout in ("contiguous", "channels_last"):
        assert [text for text in said if layout in text and "block" in text] == [
            f"planned, {layout}: {name}, block {place} of {len(blocks)}" for place, name in enumerate(blocks, 1)
        ]
    assert said[-1] == f"{len(times)} variants in turns"


def test_what_was_compiled_is_exported_copied_moved_and_follows_its_weights(tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    fast, x = Optimized(net, LAST, compiled=True), IMAGE[:, :, :8, :8]
    note(fast, input_size=(3, 8, 8))
    before = fast(x)
    torch.testing.assert_close(before, net(x), rtol=1e-4, atol=1e-4)
    assert set(fast.state_dict()) == {f"network.{name}" for name in net.state_dict()}
    export(fast, tmp_path / "net.pt2")
    assert load(tmp_path / "net.pt2", trusted=True)(torch.zeros(3, 3, 8, 8)).shape == (3, 4, 6, 6)
    torch.testing.assert_close(copy.deepcopy(fast)(x), before)
    assert copy.deepcopy(fast).double()(x.double()).dtype == torch.float64
    fast.load_state_dict({name: 2 * tensor for name, tensor in fast.state_dict().items()})
    torch.testing.assert_close(fast(x), 2 * before)


def test_a_network_that_does_not_compile_is_left_as_it_is(network: nn.Module, monkeypatch: pytest.MonkeyPatch):
    def broken(*_, **__):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(torch, "compile", broken)
    fast = optimize(network, IMAGE, cache=False, repeats=3)
    assert set(fast.report.failed.values()) == {"no compiler"}
    assert_same(fast, network)


class FakeRecord:
    def takes(self, x: Tensor) -> bool:
        return x.shape == IMAGE.shape

    def __call__(self, x: Tensor) -> str:
        return "replayed"


def test_what_was_recorded_is_taken_until_weights_move(network: nn.Module):
    fast = Optimized(network, LAST)
    fast.recording = FakeRecord()
    assert fast(IMAGE) == "replayed"
    assert fast(IMAGE[:1]).shape == (1, 10)
    assert isinstance(copy.deepcopy(fast)(IMAGE), Tensor)
    assert fast.to("cpu").float()(IMAGE) == "replayed"
    assert isinstance(fast.double()(IMAGE.double()), Tensor)
    assert fast.recording is None


LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_example_in_any_memory_format_is_taken(network: nn.Module, layout: torch.memory_format):
    x = IMAGE.contiguous(memory_format=layout)
    fast = optimize(network, x, **QUICKLY)
    for form in LAYOUTS:
        assert_same(fast, network, IMAGE.contiguous(memory_format=form))
    assert not fast(x.clone().requires_grad_()).requires_grad
    same = optimize(nn.Sequential(nn.Flatten()).eval(), x, **QUICKLY)
    assert torch.equal(same(x), x.flatten(1))


def test_a_variant_that_fails_is_left_out_with_its_reason(views: nn.Module):
    fast = optimize(views, IMAGE, **QUICKLY)
    assert_same(fast, views)
    assert "view size" in fast.report.failed["folded, channels_last"]
    assert {"as given", "folded, contiguous"} <= set(fast.report.times)


@pytest.mark.parametrize("protocol", [2, 5])
def test_the_result_can_be_saved(network: nn.Module, protocol: int):
    fast = optimize(network, IMAGE, **QUICKLY)
    file = io.BytesIO()
    torch.save(fast, file, pickle_protocol=protocol)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(IMAGE), fast(IMAGE))


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (3, 12, 12)),
        (nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)), (2, 3, 12)),
        (nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8)), (2, 3, 6, 6, 6)),
        (nn.Sequential(nn.Linear(6, 8), nn.ReLU()), (6,)),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Unflatten(1, (1, 8)), nn.Conv3d(1, 2, 3)), (1, 3, 9, 9)),
    ],
)
def test_inputs_and_layers_of_other_dimensions_are_taken(net: nn.Module, shape: tuple[int, ...]):
    x = torch.randn(shape)
    fast = optimize(net.eval(), x, **QUICKLY)
    assert_same(fast, net, x)
    assert not fast.report.failed
    assert ("folded, channels_last" in fast.report.times) is (len(shape) == 4)


def test_training_mode_and_nan_are_refused_in_a_sentence(network: nn.Module):
    with pytest.raises(LowRankError, match="inference"):
        optimize(network.train(), IMAGE)
    nn.init.constant_(network.norm.running_mean, float("nan"))
    with pytest.raises(LowRankError, match="NaN or infinite values"):
        optimize(network.eval(), IMAGE, cache=False)


def test_no_more_is_tried_once_the_budget_is_used_up(network: nn.Module):
    fast = optimize(network, IMAGE, cache=False, repeats=3, budget=1e-9)
    assert set(fast.report.times) == {"as given"}
    assert all("budget of 1e-09 s" in why for why in fast.report.failed.values())


@pytest.mark.parametrize(("limit", "told"), [(0, 1), (float("inf"), 0)])
def test_a_machine_that_is_too_busy_to_time_is_named(network: nn.Module, monkeypatch, recwarn, limit, told):
    monkeypatch.setattr("lowrank_cnn.core.clock._STEADY", limit)
    fast = optimize(network, IMAGE, cache=False, repeats=3, budget=1e-9)
    assert sum("too busy to time" in str(warning.message) for warning in recwarn) == told
    assert repr(fast.report).splitlines()[1].split()[:2] == ["as", "given"]


def test_a_choice_is_kept_and_made_again_without_the_others(network: nn.Module, tmp_path: Path):
    path, said = tmp_path / "times.json", []
    first = optimize(network, IMAGE, compile=False, cache=path, repeats=3)
    kept = open_times(path)
    key = next(key for key, times in kept.entries.items() if set(times) == set(first.report.times))
    kept[key] = {"as given": 9e3, "folded, contiguous": 1e-3, "by a form of an older version": 1e-6}
    assert kept.save()
    again = optimize(network, IMAGE, compile=False, cache=path, repeats=3, say=said.append)
    if again.report.choice == "folded, contiguous":  # still faster than the network as given
        assert said == ["folded, contiguous, as measured before", "as given", "folded, contiguous"]
    assert_same(again, network)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["nin-c3-lr", "googlenet-lr"])
def test_on_a_gpu_graphs_are_recorded(name: str):
    net = create_model(name, num_classes=10, image_size=64 if name == "googlenet-lr" else 32).cuda().eval()
    images = torch.randn(3, 2, *net.input_size, device="cuda")
    fast = optimize(net, images[0], compile=False, cache=False, repeats=3, budget=300)
    assert {"planned, recorded", "fused, recorded"} <= set(fast.report.times), fast.report.failed
    assert fast.report.times[fast.report.choice].ms == min(time.ms for time in fast.report.times.values())


def test_many_networks_of_one_class_are_all_compiled():
    torch._dynamo.reset()
    x = IMAGE[:, :, :8, :8]
    with torch._dynamo.config.patch(recompile_limit=2):  # else eight, which takes long
        for _ in range(4):
            counters.clear()
            net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
            torch.testing.assert_close(Optimized(net, LAST, compiled=True)(x), net(x))
            assert counters["stats"]["unique_graphs"] == 1


# A form that is written to a file, and made again where it is loaded.


@pytest.fixture
def nin() -> nn.Module:
    torch.manual_seed(0)
    return create_model("nin", width=0.05, norm="batch", scheme="lr-join").eval()


def test_a_written_form_is_made_again_without_measuring(last_wins, nin, tmp_path: Path, monkeypatch):
    fast = optimize(nin, IMAGE, compile=False, cache=False)
    assert fast.report.choice == "planned, contiguous"
    assert fast.chosen["ways"]
    export(fast, tmp_path / "net.safetensors")
    for place in ("plan", "optimize"):
        monkeypatch.setattr(f"lowrank_cnn.deploy.{place}.measure", lambda *_, **__: pytest.fail("measured again"))
    again = load(tmp_path / "net.safetensors")
    assert_same(again, nin)
    assert again.chosen == json.loads(json.dumps(fast.chosen))
    kinds = [[type(part).__name__ for part in net.network.modules()] for net in (again, fast)]
    assert kinds[0] == kinds[1]
    assert notes(again).input_size == (3, 30, 30)
    export(again, tmp_path / "again.safetensors")
    assert load(tmp_path / "again.safetensors").report.choice == fast.report.choice
    # What differs here, or is unknown to this version, is left out with the reason.
    monkeypatch.setattr(
        "lowrank_cnn.deploy.plan.CANDIDATES", dict.fromkeys(blocks.CANDIDATES, lambda _: nn.ReLU())
    )
    for ways in (fast.chosen["ways"], dict.fromkeys(fast.chosen["ways"], "matrix products")):
        again = reoptimize(nin, {**fast.chosen, "ways": ways})
        assert again.report.choice == "as given"
        assert again.report.failed["planned, contiguous"]
        torch.testing.assert_close(again(IMAGE), nin(IMAGE))


def test_a_network_that_changed_since_is_not_written(last_wins, nin, tmp_path: Path):
    fast = optimize(nin, IMAGE, compile=False, cache=False)
    with torch.no_grad():
        next(nin.parameters()).mul_(2)
    with pytest.raises(LowRankError, match="changed since it was optimised"):
        export(fast, tmp_path / "net.safetensors")
    with pytest.raises(LowRankError, match="merged, planned, optimised"):
        export(copy.deepcopy(fast), tmp_path / "net.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "bad",
    [{"ways": 3}, {"input": [2**20, 2**20]}, {"input": []}, {"times": {"a": "b"}}, {"choice": None, "input": 1}],
)
def test_damaged_choices_are_refused_and_an_unknown_form_runs_as_given(nin, bad: dict):
    chosen = {"choice": "faster", "ways": {}, "times": {}, "input": [1, 3, 30, 30]}
    with pytest.raises(LowRankError, match="damaged"):
        reoptimize(nin, {**chosen, **bad})
    found = reoptimize(nin, chosen)
    assert found.report.choice == "as given"
    assert "no such form" in found.report.failed["faster"]


# The forms of a GPU, and which are tried in what order.

COMPILED = Form(FOLDED, compiled=True, recorded=True)


def form_search(net: nn.Module, *, budget: float = 60.0, compile: bool = True) -> FormSearch:
    return FormSearch(net, (IMAGE,), lambda network, _: network, budget=budget, compile=compile)


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()


def test_what_is_fused_whole_computes_the_same_and_leaves_the_network_alone(monkeypatch: pytest.MonkeyPatch):
    stem = [build_conv(3, 8, 3, "lr"), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2, 1)]
    net = nn.Sequential(*stem, nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    before = [type(module) for module in net.modules()]
    monkeypatch.setattr(blocks, "_on_cpu", lambda layer: False)
    fast = form_search(net).network(FUSED, LAST)
    kinds = {type(module).__name__ for module in fast.modules()}
    assert {"FusedBlock", "FusedPool", "FusedResponseNorm"} <= kinds
    assert not {"Conv2d", "MaxPool2d", "LocalResponseNorm"} & kinds
    assert_same(fast, net)
    assert [type(module) for module in net.modules()] == before


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> FormSearch:
    """A search that takes its forms for those of a GPU; its one form takes a millisecond."""
    work = form_search(small())
    work.on_gpu = True
    work.search.made[Form(FUSED, recorded=True)] = Optimized(work.model)
    monkeypatch.setattr(
        FormSearch, "times", lambda self, _: {form: Sample(1, 1, 1, 3) for form in self.search.made}
    )
    return work


def test_on_a_gpu_chains_are_also_tried_as_dense_convs(on_gpu: FormSearch):
    assert not any(form.network == MERGED for form in on_gpu.forms().values())
    net = nn.Sequential(build_conv(3, 8, 3, "lr-join"), nn.BatchNorm2d(8), nn.ReLU()).eval()
    work = form_search(net)
    work.on_gpu = True
    assert "merged, compiled, recorded" in work.forms()
    merged = work.network(MERGED, LAST)
    assert not any(layer_kind(part) == "chain" for part in merged.modules())
    assert_same(merged, net)


def test_what_is_recorded_already_is_not_tried_again(on_gpu: FormSearch):
    names = ["planned, recorded", "fused, compiled, recorded", "folded, compiled, recorded", "folded, compiled"]
    assert [str(form) for form in on_gpu._on_gpu()] == names


@pytest.mark.parametrize("fast", ["contiguous", "channels_last"])
def test_on_a_cpu_the_faster_memory_format_is_planned_first(monkeypatch: pytest.MonkeyPatch, fast: str):
    work, tried = form_search(small()), []

    def attempt(self: FormSearch, form: Form) -> None:
        tried.append(str(form))
        self.search.made[form] = Optimized(self.model)

    def times(self: FormSearch, _: int) -> dict[Form, Sample]:
        return {
            form: Sample(ms, ms, ms, 0) for form in self.search.made for ms in [1.0 if form.layout == fast else 2]
        }

    monkeypatch.setattr(FormSearch, "attempt", attempt)
    monkeypatch.setattr(FormSearch, "times", times)
    assert work.fastest(3).report.choice == f"folded, {fast}"
    other = "channels_last" if fast == "contiguous" else "contiguous"
    assert tried[:4] == ["folded, contiguous", "folded, channels_last", f"planned, {fast}", f"planned, {other}"]
    assert tried[4:] == ["folded, channels_last, compiled", "folded, contiguous, compiled"]


def test_no_form_is_begun_at_the_end_of_the_budget(on_gpu: FormSearch, monkeypatch: pytest.MonkeyPatch):
    """And none is compiled around our kernels when less than half of it is left."""
    tried: list[Form] = []
    monkeypatch.setattr(FormSearch, "build", lambda self, form: tried.append(form))
    for share, left_out in ((0.6, Form(FUSED, compiled=True, recorded=True)), (0.85, Form(FUSED))):
        now = on_gpu.search.began + share * on_gpu.search.budget
        monkeypatch.setattr(searching, "time", SimpleNamespace(perf_counter=lambda now=now: now))
        on_gpu.attempt(left_out)
        on_gpu.attempt(COMPILED)
        assert "used up" in on_gpu.search.failed[left_out]
    assert tried == [COMPILED]


def test_a_form_that_is_not_ready_in_time_is_stopped(monkeypatch: pytest.MonkeyPatch):
    """A compiler cannot be asked to stop: `optimize(budget=30)` took 226 seconds."""
    work = form_search(small(), budget=3.0, compile=False)
    monkeypatch.setattr(FormSearch, "_folded", lambda self, chains: time.sleep(600))
    report = work.fastest(3).report
    assert report.choice == "as given"
    assert report.failed["folded, contiguous"] == "stopped: the budget of 3 s was used up"
    assert "not tried" in report.failed["planned, channels_last"]


def test_on_a_gpu_the_fused_form_is_tried_however_long_its_kernels_compile(on_gpu: FormSearch, monkeypatch):
    """A network of bands ran as given: its kernels were compiled for longer than the budget."""
    built: list[Form] = []
    on_gpu.search.made.clear()
    on_gpu.search.budget = 30.0

    def build(self: FormSearch, form: Form) -> Optimized:
        built.append(form)
        self.search.began -= 60.0  # seconds that this form takes
        return Optimized(self.model)

    monkeypatch.setattr(FormSearch, "build", build)
    on_gpu.fastest(3)
    assert built == [Form(), ON_GPU[0]]


def test_on_a_gpu_kernels_are_compiled_together_before_a_form_runs(on_gpu: FormSearch, monkeypatch):
    surveyed: list[bool] = []

    def prepare(run) -> None:
        surveyed.append(is_for_graphs())
        assert run().shape == (2, 8, 28, 28)

    monkeypatch.setattr("lowrank_cnn.deploy.optimize.prepare", prepare)
    monkeypatch.setattr(Optimized, "record", lambda self, *inputs: None)
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    for form in (Form(FOLDED, recorded=True), Form(FOLDED), COMPILED):
        on_gpu.attempt(form)
    assert not on_gpu.search.failed
    assert surveyed == [True, False], "the compiler compiles for itself"


def test_weights_that_torch_packs_wrongly_are_not_constants():
    along_rows, others = nn.Conv3d(1, 16, (1, 1, 3), 2, (0, 0, 1)), nn.Conv3d(1, 16, (3, 1, 1), 2, (1, 0, 0))
    assert [freezes(nn.Sequential(conv)) for conv in (along_rows, others, nn.Conv2d(1, 16, (1, 3)))] == [
        False,
        True,
        True,
    ]


@pytest.mark.nightly
def test_a_network_over_volumes_of_one_channel_is_compiled_without_them():
    net, x = nn.Sequential(nn.Conv3d(1, 32, (1, 1, 3), 2, (0, 0, 1))).eval(), torch.randn(2, 1, 30, 30, 30)
    made = Optimized(net, compiled=True)
    for _ in range(5):
        torch.testing.assert_close(made(x), net(x))
