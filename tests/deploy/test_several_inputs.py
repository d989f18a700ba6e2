"""Networks of several inputs, by position or by keyword, are planned and optimised as they are called."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.deploy.export import export
from lowrank_cnn.deploy.optimize import optimize
from lowrank_cnn.deploy.plan import plan
from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.schemes import build_conv


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
def test_the_result_is_called_as_its_example_was_given(example):
    net = network()
    before = copy.deepcopy(net.state_dict())
    planned = plan(net, example, cache=False, repeats=3)
    found = notes(planned).plan
    assert not found.reason
    assert [decision.name.rpartition("network.")[2] for decision in found.decisions] == ["spatial.0", "temporal"]
    fast = optimize(net, example, compile=False, cache=False, repeats=3)
    assert not fast.report.failed
    for made in (planned, fast):
        torch.testing.assert_close(call(made, example), call(net, example))
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


def test_the_mode_of_the_network_stays_and_a_choice_for_several_inputs_is_not_stored(tmp_path):
    net = network()
    fast = optimize(net, (IMAGE, FLOW), compile=False, cache=False, repeats=3)
    with pytest.raises(LowRankError, match="networks of one input alone"):
        export(fast, tmp_path / "net.safetensors")
    with pytest.raises(LowRankError, match=r"call model.eval\(\) first"):
        optimize(net.train(), {"image": IMAGE, "flow": FLOW})
    assert net.training
    assert net.temporal.training


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
    with pytest.raises(LowRankError, match="cannot be called with these inputs: missing a required argument"):
        merge(net, example_input={"mask": example["mask"]})


class Chooses(nn.Module):
    """What runs behind its conv is decided by a function of the module, the maps and the optional input."""

    def __init__(self, decide) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.n = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.always = nn.Sequential(build_conv(4, 4, 3, "lr"), nn.BatchNorm2d(4))
        for norm in (self.n, self.always[1]):
            nn.init.uniform_(norm.running_var, 0.2, 0.5)
            nn.init.normal_(norm.running_mean)
        self.decide = decide

    def forward(self, x: Tensor, ctx: Tensor | None = None) -> Tensor:
        return self.always(self.decide(self, x, ctx)).relu()


class AlwaysAsked(Chooses):
    def forward(self, x: Tensor, ctx: Tensor | None) -> Tensor:
        return super().forward(x, ctx)


class AskedByFlag(Chooses):
    def forward(self, x: Tensor, ctx: Tensor | bool | None = False) -> Tensor:
        return super().forward(x, ctx)


class AskedInOptions(Chooses):
    def forward(self, x: Tensor, *more: Tensor, **options: Tensor) -> Tensor:
        return super().forward(x, options.get("ctx", more[0] if len(more) else None))


class AskedWithin(Chooses):
    """The module that decides is inside, and takes its inputs by keyword alone."""

    def __init__(self, decide) -> None:
        super().__init__(decide)
        self.inner = Chooses(decide)

    def forward(self, x: Tensor, *, ctx: Tensor | None = None) -> Tensor:
        return self.inner(x, ctx=ctx)


def normed_if_given(net: Chooses, x: Tensor, ctx: Tensor | None) -> Tensor:
    return net.c(x) if ctx is None else net.n(net.c(x))


def normed_and_added(net: Chooses, x: Tensor, ctx: Tensor | None) -> Tensor:
    return net.c(x) if ctx is None else net.n(net.c(x)) + ctx


def added_if_given(net: Chooses, x: Tensor, ctx: Tensor | None) -> Tensor:
    return net.n(net.c(x)) if ctx is None else net.n(net.c(x)) + ctx


def normed_if_true(net: Chooses, x: Tensor, ctx: Tensor | bool | None) -> Tensor:
    return net.n(net.c(x)) if ctx is True else net.c(x)


CONTEXT = torch.randn(4, 1, 1)
BY_POSITION: list[tuple] = [(IMAGE,), (IMAGE, CONTEXT), (IMAGE, None), (torch.cat([IMAGE, IMAGE]),)]
ASKING = [(kind, decide) for kind in (Chooses, AskedInOptions) for decide in (normed_if_given, normed_and_added)]
ASKING += [(Chooses, added_if_given), (AlwaysAsked, normed_if_given), (AlwaysAsked, normed_and_added)]
ASKING += [(AskedByFlag, normed_if_true)]


ONE, TWO = (IMAGE,), (IMAGE, CONTEXT)
REWRITE = {
    "merge": lambda net, inputs: merge(net, example_input=inputs),
    "plan": lambda net, inputs: plan(net, inputs, cache=False, repeats=3),
    "optimize": lambda net, inputs: optimize(net, inputs, cache=False, compile=False, repeats=3),
    "fuse": lambda net, _: fuse(net),
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("rewrite", "example"),
    [("merge", ONE), ("merge", TWO), ("plan", TWO), ("optimize", ONE), ("fuse", ONE)],
)
@pytest.mark.parametrize(("kind", "decide"), ASKING)
def test_calls_of_every_other_kind_give_what_the_original_does(last_wins, rewrite, kind, decide, example):
    if kind is AlwaysAsked and len(example) == 1:
        example = (IMAGE[:, :, :8], CONTEXT)
    net = kind(decide).eval()
    made = REWRITE[rewrite](net, example)
    calls = [call for call in BY_POSITION if kind is not AlwaysAsked or len(call) == 2]
    calls += [(IMAGE, True)] if decide is normed_if_true else []
    for call in calls:
        torch.testing.assert_close(made(*call), net(*call), rtol=1e-4, atol=1e-4)
    if rewrite != "optimize" and kind is not AlwaysAsked:  # an optimised network is called as its example was
        torch.testing.assert_close(made(IMAGE, ctx=CONTEXT), net(IMAGE, ctx=CONTEXT), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("keywords", [{"x": IMAGE}, {"x": IMAGE, "ctx": CONTEXT}])
def test_inner_modules_that_ask_are_folded_for_every_call(keywords):
    net = AskedWithin(normed_and_added).eval()
    made = merge(net, example_input=keywords)
    assert isinstance(made.inner.always[1], nn.Identity)
    for call in ({"x": IMAGE}, {"x": IMAGE, "ctx": CONTEXT}, {"x": IMAGE, "ctx": None}):
        torch.testing.assert_close(made(**call), net(**call), rtol=1e-4, atol=1e-4)


def test_merge_folds_what_every_call_passes_through():
    for decide, folded in ((normed_and_added, False), (added_if_given, True)):
        for example in ((IMAGE,), (IMAGE, CONTEXT)):
            made = merge(Chooses(decide).eval(), example_input=example)
            assert isinstance(made.n, nn.Identity) is folded
            assert isinstance(made.always[1], nn.Identity)


def test_a_plan_is_used_for_every_size_with_the_inputs_that_it_was_made_for(last_wins):
    made = REWRITE["plan"](Chooses(added_if_given).eval(), (IMAGE, CONTEXT))
    made.original = nn.Identity()  # which would be called
    assert made(IMAGE[:1, :, :9], CONTEXT).shape == (1, 4, 7, 10)
