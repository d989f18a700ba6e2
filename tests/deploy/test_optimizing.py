import copy
import json
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lowrank_cnn.deploy.exporting import export, load
from lowrank_cnn.deploy.optimizing import optimize
from lowrank_cnn.deploy.planning import plan
from lowrank_cnn.models import create_model
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import note, notes


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    net = create_model("nin", width=0.05, norm="batch", scheme="lr-join").eval()
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_var, 0.5, 2)
    return net


IMAGE = torch.randn(2, 3, 30, 30, generator=torch.Generator().manual_seed(1))


def test_the_result_computes_the_same_and_says_how(network: nn.Module):
    fast = optimize(network, IMAGE, compile=False, cache=False, repeats=3)
    torch.testing.assert_close(fast(IMAGE), network(IMAGE), rtol=1e-4, atol=1e-4)
    times = fast.report.times
    assert set(times) == {
        "as given", "folded, contiguous", "planned, contiguous", "folded, channels_last", "planned, channels_last"
    }  # fmt: skip
    assert times[fast.report.choice].ms == min(sample.ms for sample in times.values()) <= times["as given"].ms
    assert json.dumps(fast.report.to_dict())


def test_what_is_under_way_is_said(network: nn.Module):
    said: list[str] = []
    fast = optimize(network, IMAGE, compile=False, cache=False, repeats=3, say=said.append)
    blocks = [d.name for d in notes(plan(network, IMAGE, cache=False, repeats=3)).plan.decisions]  # type: ignore[union-attr]
    for layout in ("contiguous", "channels_last"):
        assert [text for text in said if layout in text] == [
            f"planned, {layout}: {name}, block {place} of {len(blocks)}" for place, name in enumerate(blocks, 1)
        ]
    assert said[-1] == f"{len(fast.report.times)} variants in turns"


def test_it_exports_for_images_like_the_example(tmp_path):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 2)).eval()
    fast = optimize(net, torch.randn(1, 1, 7, 7), compile=False, cache=False, repeats=3)
    assert notes(fast).input_size == (1, 7, 7)
    export(fast, tmp_path / "net.pt2")
    assert load(tmp_path / "net.pt2", trusted=True)(torch.zeros(3, 1, 7, 7)).shape == (3, 2)


def test_what_was_compiled_is_exported_copied_and_moved(network: nn.Module, tmp_path):
    fast = sys.modules[optimize.__module__].Optimized(network, torch.channels_last, compiled=True)
    note(fast, input_size=(3, 30, 30))
    torch.testing.assert_close(fast(IMAGE), network(IMAGE), rtol=1e-4, atol=1e-4)
    assert set(fast.state_dict()) == {f"network.{name}" for name in network.state_dict()}
    export(fast, tmp_path / "net.pt2")
    assert load(tmp_path / "net.pt2", trusted=True)(torch.zeros(3, 3, 30, 30)).shape == (3, 10)
    torch.testing.assert_close(copy.deepcopy(fast)(IMAGE), fast(IMAGE))
    assert fast.double()(IMAGE.double()).dtype == torch.float64


def test_a_sequential_is_compiled_too():
    torch._dynamo.reset()
    counters.clear()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    sys.modules[optimize.__module__].Optimized(net, torch.channels_last, compiled=True)(torch.randn(1, 3, 8, 8))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_network_that_does_not_compile_is_left_as_it_is(network: nn.Module, monkeypatch: pytest.MonkeyPatch):
    def broken(variant: nn.Module, x: torch.Tensor) -> nn.Module:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(sys.modules[optimize.__module__], "_compiled", broken)
    fast = optimize(network, IMAGE, cache=False, repeats=3)
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
    fast = sys.modules[optimize.__module__].Optimized(network, torch.channels_last)
    fast.recorded = FakeRecord()
    assert fast(IMAGE) == "replayed"
    assert fast(IMAGE[:1]).shape == (1, 10)
    assert isinstance(copy.deepcopy(fast)(IMAGE), torch.Tensor)
    assert isinstance(fast.double()(IMAGE.double()), torch.Tensor)
    assert fast.recorded is None


class FakeRecord:
    def takes(self, x: torch.Tensor) -> bool:
        return x.shape == IMAGE.shape

    def __call__(self, x: torch.Tensor) -> str:
        return "replayed"


def test_what_is_fused_whole_computes_the_same_and_leaves_the_network_alone():
    net = create_model("googlenet-lr", num_classes=10, width=0.1, image_size=64).eval()
    before = [type(module) for module in net.modules()]
    images = torch.randn(2, 3, 64, 64)
    fast = sys.modules[optimize.__module__]._fused(net, images)
    kinds = {type(module).__name__ for module in fast.modules()}
    assert {"FusedComposite", "FusedPool", "FusedResponseNorm"} <= kinds
    assert not {"Conv2d", "MaxPool2d", "LocalResponseNorm"} & kinds
    torch.testing.assert_close(fast(images), net(images), rtol=1e-4, atol=1e-5)
    assert [type(module) for module in net.modules()] == before


class Skipping(nn.Module):
    """Leaves out its last layer, which fused layers, being fewer, do not let it do."""

    def __init__(self) -> None:
        super().__init__()
        convs = [nn.Conv2d(3, 8, 3, padding=1), *(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))]
        self.features = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), convs[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(3):
            x = self.features[index](x)
        return x


def test_what_differs_fused_is_refused():
    with pytest.raises(LowRankError, match="results differ"):
        sys.modules[optimize.__module__]._fused(Skipping().eval(), torch.randn(2, 3, 16, 16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["nin-c3-lr", "googlenet-lr"])
def test_on_a_gpu_graphs_are_recorded(name: str):
    net = create_model(name, num_classes=10, image_size=64 if name == "googlenet-lr" else 32).cuda().eval()
    images = torch.randn(3, 2, *net.input_size, device="cuda")
    fast = optimize(net, images[0], compile=False, cache=False, repeats=3)
    assert {"planned, recorded", "fused, recorded"} <= set(fast.report.times), fast.report.failed
    assert fast.report.times[fast.report.choice].ms == min(time.ms for time in fast.report.times.values())
