"""Results are compared whatever containers hold them, and no call leaves a trace in a network."""

import random
from collections import namedtuple
from dataclasses import dataclass, field

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lowrank_cnn as lr
from lowrank_cnn.core.compare import agree, difference, flattened, mapped, objection, tensors_of, tolerance
from lowrank_cnn.data import Standardize
from lowrank_cnn.train import Recipe
from lowrank_cnn.train.trained import Trained

NAN, INF = float("nan"), float("inf")
ONES = torch.ones(2, 3)


TWO = torch.full((3,), 2.0)
Pair = namedtuple("Pair", "first second")


@dataclass
class Maps:
    logits: Tensor
    more: list = field(default_factory=list)
    loss: float | None = None


@dataclass(frozen=True)
class Frozen:
    maps: Maps


RESULTS = [
    ONES, (ONES, [TWO]), {"a": ONES, "b": (TWO, 3)}, Pair(ONES, None), Maps(ONES, [TWO]),
    {"x": Frozen(Maps(ONES))},
]  # fmt: skip


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_values_are_found_and_replaced_in_every_container(result):
    doubled = mapped(lambda value: value * 2 if isinstance(value, Tensor) else value, result)
    assert type(doubled) is type(result)
    assert flattened(doubled)[1] == flattened(result)[1]
    for new, old in zip(tensors_of(doubled), tensors_of(result), strict=True):
        assert torch.equal(new, 2 * old)
    for by in ("largest", "norm"):
        assert difference(doubled, result, by=by) == pytest.approx(1.0)
    assert agree(result, result)
    assert flattened(Maps)[0] == [Maps]  # the class itself holds nothing


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("by", ["largest", "norm"])
def test_what_is_not_finite_never_agrees(bad: float, by):
    spoilt = ONES.clone()
    spoilt[0, 0] = bad
    for ours, right in ((spoilt, ONES), (ONES, spoilt), (spoilt, spoilt)):
        assert difference(ours, right, by=by) == INF
        assert not agree([ONES, ours], [ONES, right])
    huge = 1e200 * ONES.double()  # its norm overflows
    assert difference([ONES, 2 * huge], [ONES, huge], by="norm") == INF


@pytest.mark.parametrize(
    ("ours", "right"),
    [
        (torch.ones(3), torch.ones(4)),
        (torch.ones(1, 3), torch.ones(3)),
        ((ONES,), [ONES]),
        ({"a": ONES}, {"b": ONES}),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([1, 2]), torch.tensor([1.0, 2.0])),
        (None, ONES),
        ((ONES, 1), (ONES, 2)),
        (object(), object()),
        (Maps(ONES), Frozen(Maps(ONES))),
        (Maps(ONES, [TWO]), Maps(ONES)),
        (Maps(ONES, loss=1.0), Maps(ONES, loss=2.0)),
        (Maps(ONES), {"logits": ONES, "more": [], "loss": None}),
    ],
)
def test_other_shapes_structures_and_values_do_not_agree(ours, right):
    assert difference(ours, right) == INF


def test_precision_sets_the_limit():
    small = torch.full((4,), 1 + 1e-6)
    assert agree(small, torch.ones(4))
    assert not agree(small.double(), torch.ones(4).double())
    assert agree((1.01 * ONES).bfloat16(), ONES.bfloat16())
    assert agree(torch.zeros(3), torch.zeros(3))
    assert not agree(torch.full((3,), 1e-9), torch.zeros(3))
    assert tolerance(Maps(ONES.double())) == tolerance(ONES.double())


def test_networks_are_compared_on_more_than_zeros():
    net, other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    other.load_state_dict({**net.state_dict(), "weight": 2 * net.weight})
    zeros = torch.zeros(1, 3, 8, 8)
    assert difference(other(zeros), net(zeros)) == 0
    assert "would differ" in objection(other, net, zeros)
    assert objection(net, net, zeros) == ""
    assert "it fails" in objection(nn.Conv2d(5, 4, 3), net, zeros)


class Restless(nn.Module):
    """Changes something in every forward, as `kind` says. The root and its part `enc` have buffers of one name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Linear(32, 2)
        self.enc.register_buffer("scale", torch.tensor(5.0))
        self.register_buffer("scale", torch.zeros(()))
        self.kind, self.state, self.log, self.seen = kind, torch.ones(32), [], {}

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "counts":
            self.scale += 1
        if self.kind == "overwrites":
            x.mul_(0.5)
        if self.kind == "draws":
            x = x + 0 * (torch.rand(()) + random.random() + numpy.random.rand())
        y = (self.enc(x) * self.enc.scale).mean((2, 3))
        if self.kind == "stores":
            self.state, self.last = y.detach(), y.shape
            self.log.append(self.state)
            self.seen[len(self.log)] = self.state
        return self.head(y)


def state_of(model: nn.Module) -> dict[str, object]:
    """The attributes of every module by identity, and the values of its tensors."""
    found: dict[str, object] = {}
    for name, part in model.named_modules():
        homes = (("", vars(part)), ("buffer ", part._buffers), ("parameter ", part._parameters))
        for key, value in ((f"{name}.{kind}{key}", value) for kind, home in homes for key, value in home.items()):
            found[key] = (id(value), str(value))
    return found


CALLS = {
    "count": lambda net, x, _: lr.count(net, (3, 8, 8)),
    "count of an example": lambda net, x, _: lr.count(net, x),
    "time_model": lambda net, x, _: lr.time_model(net, x, repeats=3),
    "convert": lambda net, x, _: lr.convert(net, "lr", input_size=(3, 8, 8), allow_costlier=True),
    "decompose": lambda net, x, _: lr.decompose(net, macs=0.8, input_size=x),
    "decompose by images": lambda net, x, _: lr.decompose(net, macs=0.8, images=x),
    "thin": lambda net, x, _: lr.thin(net, width=0.5, multiple=4, input_size=x),
    "prune": lambda net, x, _: lr.prune(net, width=0.5, multiple=4, input_size=x),
    "merge": lambda net, x, _: lr.merge(net, example_input=x),
    "plan": lambda net, x, _: lr.plan(net, x, cache=False, repeats=3),
    "plan by keyword": lambda net, x, _: lr.plan(net, {"x": x}, cache=False, repeats=3),
    "optimize": lambda net, x, _: lr.optimize(net, x, cache=False, repeats=3, compile=False),
    "design": lambda net, x, _: lr.design(net, x, macs=0.6, repeats=3),
    "export to .ts": lambda net, x, folder: lr.export(net, folder / "net.ts", example_input=x),
    "export to .pt2": lambda net, x, folder: lr.export(net, folder / "net.pt2", example_input=x),
    "export to .onnx": lambda net, x, folder: lr.export(net, folder / "net.onnx", example_input=x),
    "quantize": lambda net, x, folder: lr.quantize(net, x, folder / "net.onnx"),
    "predict": lambda net, x, _: lr.predict(Trained(net, *TRAINED), x[0].byte()),
    "evaluate": lambda net, x, _: lr.evaluate(net, TensorDataset(x, torch.tensor([0, 1])), progress=False),
}
TRAINED = (Standardize(torch.zeros(3), torch.ones(3)), Recipe(), ("a", "b"), (3, 8, 8))
KINDS = ("counts", "stores", "draws", "overwrites")
SLOW = {"design": ("overwrites",), "export to .onnx": ("draws",), "quantize": ("overwrites",)}
BY_DAY = (KINDS[::2], KINDS[1::2])
"""Every call meets two kinds of networks in turn, and all of them by night."""
TRAINING = ("count", "time_model", "convert", "decompose", "thin", "export to .ts", "quantize")
"""Calls that also take a network in training mode, and leave it there."""
FRESH = ("convert", "thin")
"""Calls whose result has fresh weights: they draw these from torch's generator."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        if kind in SLOW.get(name, BY_DAY[at % 2])
        else pytest.param(name, kind, marks=pytest.mark.nightly)
        for at, name in enumerate(CALLS)
        for kind in SLOW.get(name, KINDS)
    ],
)
def test_no_call_changes_the_network_the_generators_or_the_example(name: str, kind: str, tmp_path):
    net, x = Restless(kind), torch.randn(2, 3, 8, 8)
    net.train(name in TRAINING and kind in ("draws", "overwrites"))
    before, given = state_of(net), x.clone()
    drawn = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    result = CALLS[name](net, x, tmp_path)
    assert state_of(net) == before
    assert torch.equal(x, given)
    assert name in FRESH or torch.equal(torch.get_rng_state(), drawn[0])
    assert (random.getstate(), str(numpy.random.get_state())) == drawn[1:]
    if isinstance(result, nn.Module):  # nor does the result start with what trial runs left
        scales = {str(b) for n, b in result.named_buffers() if n.endswith("scale")}
        assert "tensor(5.)" in scales <= {"tensor(0.)", "tensor(5.)"}  # a graph has no buffer that it does not use
        assert not any(isinstance(v, Tensor) and v.is_meta for m in result.modules() for v in vars(m).values())
