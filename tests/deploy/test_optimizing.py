import copy
import io
import json
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.deploy.optimize import Form, Optimized, optimize
from lowrank_cnn.deploy.plan import Cache, plan
from lowrank_cnn.method.schemes import build_conv
from lowrank_cnn.models import create_model

LAST = Form("channels_last")
COMPILED = Form("channels_last", compiled=True)


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


IMAGE = torch.randn(2, 3, 30, 30, generator=torch.Generator().manual_seed(1))


def test_the_result_computes_the_same_and_says_how(network: nn.Module):
    fast = optimize(network, IMAGE, compile=False, cache=False, repeats=3, budget=600)
    torch.testing.assert_close(fast(IMAGE), network(IMAGE), rtol=1e-4, atol=1e-4)
    times = fast.report.times
    assert set(times) == {
        "as given", "folded, contiguous", "planned, contiguous", "folded, channels_last", "planned, channels_last"
    }  # fmt: skip
    assert times[fast.report.choice].ms == min(sample.ms for sample in times.values()) <= times["as given"].ms
    assert json.dumps(fast.report.to_dict())


def test_what_is_under_way_is_said(network: nn.Module):
    said: list[str] = []
    fast = optimize(network, IMAGE, compile=False, cache=False, repeats=3, budget=600, say=said.append)
    blocks = [d.name for d in notes(plan(network, IMAGE, cache=False, repeats=3)).plan.decisions]
    for layout in ("contiguous", "channels_last"):
        assert [text for text in said if layout in text and "block" in text] == [
            f"planned, {layout}: {name}, block {place} of {len(blocks)}" for place, name in enumerate(blocks, 1)
        ]
    assert said[-1] == f"{len(fast.report.times)} variants in turns"


def test_it_exports_for_images_like_the_example(tmp_path):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 2)).eval()
    fast = optimize(net, torch.randn(1, 1, 7, 7), compile=False, cache=False, repeats=3)
    assert notes(fast).input_size == (1, 7, 7)
    export(fast, tmp_path / "net.pt2")
    assert load(tmp_path / "net.pt2", trusted=True)(torch.zeros(3, 1, 7, 7)).shape == (3, 2)


def test_what_was_compiled_is_exported_copied_and_moved(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    fast, x = Optimized(net, COMPILED), IMAGE[:, :, :8, :8]
    note(fast, input_size=(3, 8, 8))
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
    assert set(fast.state_dict()) == {f"network.{name}" for name in net.state_dict()}
    export(fast, tmp_path / "net.pt2")
    assert load(tmp_path / "net.pt2", trusted=True)(torch.zeros(3, 3, 8, 8)).shape == (3, 4, 6, 6)
    torch.testing.assert_close(copy.deepcopy(fast)(x), fast(x))
    assert fast.double()(x.double()).dtype == torch.float64


def test_a_network_that_does_not_compile_is_left_as_it_is(network: nn.Module, monkeypatch: pytest.MonkeyPatch):
    def broken(*_, **__):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(torch, "compile", broken)
    fast = optimize(network, IMAGE, cache=False, repeats=3, budget=600)
    assert set(fast.report.failed.values()) == {"no compiler"}
    torch.testing.assert_close(fast(IMAGE), network(IMAGE), rtol=1e-4, atol=1e-4)


def test_other_layouts_and_gradients_do_not_disturb_it(network: nn.Module):
    fast = optimize(network, IMAGE, compile=False, cache=False, repeats=3)
    last = IMAGE.contiguous(memory_format=torch.channels_last).requires_grad_()
    out = fast(last)
    assert not out.requires_grad
    torch.testing.assert_close(out, network(IMAGE).detach(), rtol=1e-4, atol=1e-4)


def test_training_mode_is_refused(network: nn.Module):
    with pytest.raises(LowRankError, match="inference"):
        optimize(network.train(), IMAGE)


def test_what_was_recorded_is_taken_until_weights_move(network: nn.Module):
    fast = Optimized(network, LAST)
    fast.recording = FakeRecord()
    assert fast(IMAGE) == "replayed"
    assert fast(IMAGE[:1]).shape == (1, 10)
    assert isinstance(copy.deepcopy(fast)(IMAGE), torch.Tensor)
    assert isinstance(fast.double()(IMAGE.double()), torch.Tensor)
    assert fast.recording is None


class FakeRecord:
    def takes(self, x: torch.Tensor) -> bool:
        return x.shape == IMAGE.shape

    def __call__(self, x: torch.Tensor) -> str:
        return "replayed"


LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_example_in_any_memory_format_is_taken(network: nn.Module, layout: torch.memory_format):
    x = IMAGE.contiguous(memory_format=layout)
    fast = optimize(network, x, compile=False, cache=False, repeats=3)
    for form in LAYOUTS:
        given = IMAGE.contiguous(memory_format=form)
        torch.testing.assert_close(fast(given), network(given), rtol=1e-4, atol=1e-4)
    same = optimize(nn.Sequential(nn.Flatten()).eval(), x, compile=False, cache=False, repeats=3)
    assert torch.equal(same(x), x.flatten(1))


class Views(nn.Module):
    """Views maps as vectors, which a network in channels_last does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Linear(8 * 900, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.conv(x))
        return self.fc(y.view(y.size(0), -1))


def test_a_variant_that_fails_is_left_out_with_its_reason():
    net = Views().eval()
    fast = optimize(net, IMAGE, compile=False, cache=False, repeats=3)
    torch.testing.assert_close(fast(IMAGE), net(IMAGE), rtol=1e-4, atol=1e-5)
    assert "view size" in fast.report.failed["folded, channels_last"]
    assert {"as given", "folded, contiguous"} <= set(fast.report.times)


class Walks(nn.Module):
    """Walks its layers one by one, looking at values: it cannot be captured, and fused it would be another."""

    def __init__(self) -> None:
        super().__init__()
        convs = [nn.Conv2d(3, 8, 3, padding=1), *(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))]
        self.features = nn.Sequential(convs[0], nn.ReLU(), nn.BatchNorm2d(8), convs[1], nn.ReLU(), convs[2])
        nn.init.normal_(self.features[2].running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for layer in self.features:
            x = layer(x)
            seen.append(x if x.mean() < 1e9 else 2 * x)
        return torch.cat(seen, dim=1)


def test_what_cannot_be_captured_still_computes_the_same():
    net = Walks().eval()
    fast = optimize(net, IMAGE, compile=False, cache=False, repeats=3)
    torch.testing.assert_close(fast(IMAGE), net(IMAGE), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("protocol", [2, 5])
def test_the_result_can_be_saved(network: nn.Module, protocol: int):
    fast = optimize(network, IMAGE, compile=False, cache=False, repeats=3)
    file = io.BytesIO()
    torch.save(fast, file, pickle_protocol=protocol)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    torch.testing.assert_close(again(IMAGE), fast(IMAGE))


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (3, 12, 12)),
        (nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)), (2, 3, 12)),
        (nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8)), (2, 3, 6, 6, 6)),
        (nn.Sequential(nn.Linear(6, 8), nn.ReLU()), (6,)),
    ],
)
def test_inputs_of_other_dimensions_are_taken(net: nn.Module, shape: tuple[int, ...]):
    x = torch.randn(shape)
    fast = optimize(net.eval(), x, compile=False, cache=False, repeats=3)
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)


def test_a_network_with_3d_convs_inside_is_tried_in_both_memory_formats():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Unflatten(1, (1, 8)), nn.Conv3d(1, 2, 3)).eval()
    fast = optimize(net, torch.randn(1, 3, 9, 9), compile=False, cache=False, repeats=3)
    assert not fast.report.failed
    assert "folded, channels_last" in fast.report.times


def test_nan_is_refused_in_a_sentence(network: nn.Module):
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.constant_(part.running_mean, float("nan"))
    with pytest.raises(LowRankError, match="NaN or infinite values"):
        optimize(network, IMAGE, cache=False)


def test_no_more_is_tried_once_the_budget_is_used_up(network: nn.Module):
    fast = optimize(network, IMAGE, cache=False, repeats=3, budget=1e-9)
    assert set(fast.report.times) == {"as given"}
    assert all("budget of 1e-09 s" in why for why in fast.report.failed.values())


def test_a_choice_is_kept_and_made_again_without_the_others(network: nn.Module, tmp_path):
    path, said = tmp_path / "times.json", []
    first = optimize(network, IMAGE, compile=False, cache=path, repeats=3)
    kept = Cache.open(path)
    key = next(key for key, times in kept.entries.entries.items() if set(times) == set(first.report.times))
    kept.keep(key, {"as given": 9e3, "folded, contiguous": 1e-3})
    assert kept.save()
    again = optimize(network, IMAGE, compile=False, cache=path, repeats=3, say=said.append)
    if again.report.choice == "folded, contiguous":  # still faster than the network as given
        assert said == ["folded, contiguous, as measured before", "as given", "folded, contiguous"]
    torch.testing.assert_close(again(IMAGE), network(IMAGE), rtol=1e-4, atol=1e-4)


def test_new_weights_are_not_computed_with_old_ones(network: nn.Module):
    fast = Optimized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), COMPILED)
    before = fast(IMAGE)
    fast.load_state_dict({name: 2 * tensor for name, tensor in fast.state_dict().items()})
    torch.testing.assert_close(fast(IMAGE), 2 * before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["nin-c3-lr", "googlenet-lr"])
def test_on_a_gpu_graphs_are_recorded(name: str):
    net = create_model(name, num_classes=10, image_size=64 if name == "googlenet-lr" else 32).cuda().eval()
    images = torch.randn(3, 2, *net.input_size, device="cuda")
    fast = optimize(net, images[0], compile=False, cache=False, repeats=3, budget=300)
    assert {"planned, recorded", "fused, recorded"} <= set(fast.report.times), fast.report.failed
    assert fast.report.times[fast.report.choice].ms == min(time.ms for time in fast.report.times.values())


def test_a_move_that_moves_nothing_keeps_what_was_recorded(network: nn.Module):
    fast = Optimized(network, LAST)
    fast.recording = FakeRecord()
    assert fast.to("cpu").float()(IMAGE) == "replayed"


def test_many_networks_of_one_class_are_all_compiled():
    torch._dynamo.reset()
    x = IMAGE[:, :, :8, :8]
    with torch._dynamo.config.patch(recompile_limit=2):  # else eight, which takes long
        for _ in range(4):
            counters.clear()
            net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
            torch.testing.assert_close(Optimized(net, COMPILED)(x), net(x))
            assert counters["stats"]["unique_graphs"] == 1
