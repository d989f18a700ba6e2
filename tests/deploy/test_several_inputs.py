"""Networks of several inputs, by position or by keyword, are planned and optimised as they are called."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.deploy import merge, optimize, plan
from lowrank_cnn.deploy.exporting import export
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import notes


class TwoStreams(nn.Module):
    """An image and its optical flow; `scale` is an option."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.temporal = nn.Conv2d(2, 8, 5, padding=2)

    def forward(self, image: Tensor, flow: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        y = self.spatial(image) + torch.relu(self.temporal(flow))
        return {"maps": y if scale is None else y * scale}


IMAGE, FLOW, SCALE = torch.randn(2, 3, 12, 12), torch.randn(2, 2, 12, 12), torch.tensor(3.0)
EXAMPLES = [
    (IMAGE, FLOW),
    (IMAGE, FLOW, SCALE),
    {"image": IMAGE, "flow": FLOW},
    {"scale": SCALE, "flow": FLOW, "image": IMAGE},
]


def network() -> nn.Module:
    torch.manual_seed(0)
    net = TwoStreams()
    nn.init.normal_(net.spatial[1].running_mean)
    return net.eval()


def call(net: nn.Module, example: tuple | dict) -> Tensor:
    with torch.no_grad():
        return (net(**example) if isinstance(example, dict) else net(*example))["maps"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_plan_is_called_as_its_example_was_given(example):
    net = network()
    planned = plan(net, example, cache=False, repeats=3)
    found = notes(planned).plan
    assert found is not None
    assert not found.reason
    assert [decision.name.rpartition("network.")[2] for decision in found.decisions] == ["spatial.0", "temporal"]
    torch.testing.assert_close(call(planned, example), call(net, example))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_optimised_network_is_called_as_its_example_was_given(example):
    net = network()
    before = copy.deepcopy(net.state_dict())
    fast = optimize(net, example, compile=False, cache=False, repeats=3)
    assert not fast.report.failed
    torch.testing.assert_close(call(fast, example), call(net, example))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_other_calls_go_to_the_original_or_are_refused():
    net = network()
    planned = plan(net, (IMAGE, FLOW), cache=False, repeats=3)
    torch.testing.assert_close(call(planned, (IMAGE, FLOW, SCALE)), call(net, (IMAGE, FLOW, SCALE)))
    small = (IMAGE[:1, :, :6], FLOW[:1, :, :6])
    torch.testing.assert_close(call(planned, small), call(net, small))
    fast = optimize(net, {"image": IMAGE, "flow": FLOW}, compile=False, cache=False, repeats=3)
    with pytest.raises(LowRankError, match="made for image, flow, not for image, scale"):
        fast(image=IMAGE, scale=SCALE)
    with pytest.raises(LowRankError, match="give all of these"):
        fast(IMAGE)


@pytest.mark.parametrize("transform", [plan, optimize])
@pytest.mark.parametrize(
    ("example", "sentence"),
    [
        ((), "at least one input"),
        ({}, "at least one input"),
        ((IMAGE, "flow"), "is a tensor, not str"),
        ((IMAGE,), "missing 1 required positional argument"),
        ({"image": IMAGE, "other": FLOW}, "does not run on an input of 2x3x12x12, float32 and 2x2x12x12"),
    ],
)
def test_an_example_that_does_not_run_is_refused(transform, example, sentence):
    with pytest.raises(LowRankError, match=sentence):
        transform(network(), example, cache=False)


def test_keyword_examples_leave_the_mode_of_the_network():
    net = network().train()
    with pytest.raises(LowRankError, match=r"call model.eval\(\) first"):
        optimize(net, {"image": IMAGE, "flow": FLOW})
    assert net.training
    assert net.temporal.training


def test_what_was_chosen_for_several_inputs_is_not_stored(tmp_path):
    fast = optimize(network(), (IMAGE, FLOW), compile=False, cache=False, repeats=3)
    with pytest.raises(LowRankError, match="networks of one input alone"):
        export(fast, tmp_path / "net.safetensors")


class Negates(nn.Module):
    """Asks for an option that it does not compute with: a symbolic trace takes the wrong way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, negated: bool | None = None) -> Tensor:
        return self.conv(x) if negated is None else -self.conv(x)


def test_an_option_that_decides_alone_keeps_its_default():
    net = Negates().eval()
    planned = plan(net, IMAGE, cache=False, repeats=3)
    assert not notes(planned).plan.reason
    torch.testing.assert_close(planned(IMAGE), net(IMAGE))
    torch.testing.assert_close(planned(IMAGE, True), net(IMAGE, True))


class Masked(nn.Module):
    """Two inputs, of which the second may go by keyword alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
        nn.init.uniform_(self.body[1].running_var, 0.5, 2.0)

    def forward(self, image: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.body(image).relu() * mask


class ByKeywordAlone(Masked):
    def forward(self, image: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(image, mask)


@pytest.mark.parametrize("kind", [Masked, ByKeywordAlone])
def test_merge_takes_inputs_by_keyword(kind: type[nn.Module]):
    net, example = kind().eval(), {"mask": torch.rand(2, 1, 6, 6), "image": torch.randn(2, 3, 6, 6)}
    merged = merge(net, example_input=example)
    assert type(merged) is kind
    assert isinstance(merged.body[1], nn.Identity)
    assert [row.name for row in notes(merged).merging] == ["body.0"]
    torch.testing.assert_close(merged(**example), net(**example), rtol=1e-4, atol=1e-5)
    both = (example["image"], {"mask": example["mask"]})
    assert isinstance(merge(net, example_input=both).body[1], nn.Identity)
    with pytest.raises(LowRankError, match="not called with these inputs: missing a required argument"):
        merge(net, example_input={"mask": example["mask"]})
