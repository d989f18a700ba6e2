"""Layers by compiled strips: what they take, what follows them, and the network without the package."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.deploy import cpu_convs as module
from lowrank_cnn.deploy.block_forms import CANDIDATES, in_layers
from lowrank_cnn.deploy.blocks import Epilogue, in_blocks
from lowrank_cnn.deploy.cpu_convs import StripConv2d, has_strips
from lowrank_cnn.kernels.strips import available
from lowrank_cnn.method.schemes import build_conv

built = pytest.mark.skipif(not available(torch.float32), reason="lowrank-strips is not built: `make strips`")


@built
@pytest.mark.parametrize("size", [(8, 10), (7, 9)], ids=str)
@pytest.mark.parametrize(
    "epilogue",
    [
        Epilogue(),
        Epilogue("relu"),
        Epilogue("relu", nn.MaxPool2d(2)),
        Epilogue("silu", nn.MaxPool2d(2, ceil_mode=True)),
        Epilogue("relu", adds=True),
        Epilogue("relu", nn.MaxPool2d(3, 2), adds=True),
    ],
    ids=str,
)
def test_a_layer_with_what_follows_it(epilogue: Epilogue, size):
    torch.manual_seed(0)
    layer = build_conv(20, 12, 3, "lr").eval()
    x = torch.randn(2, 20, *size).contiguous(memory_format=torch.channels_last)
    residual = torch.randn(2, 12, *size) if epilogue.adds else None
    exact = copy.deepcopy(layer).double()
    right = epilogue.in_order(exact(x.double()), None if residual is None else residual.double())
    fast = StripConv2d(layer, epilogue)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, residual).double(), right, rtol=0, atol=1e-5)
        torch.testing.assert_close(fast.plain()(x, residual).double(), right, rtol=0, atol=1e-5)
        if residual is None:
            torch.testing.assert_close(fast(x[0]), fast(x)[0])


@built
def test_other_layers_are_not_taken():
    others = [nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, (1, 3), padding=(0, 1), stride=2), nn.Linear(3, 3)]
    others += [
        nn.Conv2d(8, 8, (1, 3)),
        nn.Conv2d(8, 8, (1, 3), padding=(0, 2), dilation=2),
        build_conv(8, 8, 5, "lr"),
    ]
    others += [nn.Conv2d(8, 8, (1, 3), padding=(0, 1)).double(), nn.Conv2d(8, 8, (3, 1), padding=(1, 0), groups=2)]
    assert not any(map(StripConv2d.takes, others))
    assert not has_strips(nn.Sequential(*others))
    with pytest.raises(ValueError, match="1x3 and 3x1"):
        StripConv2d(others[0])
    assert has_strips(nn.Sequential(nn.Conv2d(8, 8, (3, 1), padding=(1, 0))))


@built
@pytest.mark.parametrize("scheme", ["lr", "lr-join", "separable"])
def test_a_plan_may_choose_it_and_an_export_holds_layers(scheme: str):
    torch.manual_seed(0)
    net = nn.Sequential(build_conv(16, 16, 3, scheme), nn.ReLU(), nn.MaxPool2d(2)).eval()
    x = torch.randn(2, 16, 8, 8)
    _, blocks, _ = in_blocks(net, x)
    made = CANDIDATES["compiled strips"](blocks[0])
    assert made is not None
    torch.testing.assert_close(made.eval()(x), net(x), rtol=0, atol=1e-5)
    only = {name: CANDIDATES[name] for name in ("as given", "compiled strips")}
    planned = lr.plan(net, x, cache=False, candidates=only, repeats=3)
    (decision,) = lr.notes(planned).plan.decisions
    assert set(decision.times) == set(only)
    assert not any(isinstance(part, StripConv2d) for part in in_layers(nn.Sequential(made)).modules())


@built
def test_without_the_package_the_layer_itself_runs(monkeypatch):
    layer = build_conv(16, 8, 3, "lr").eval()
    fast, x = StripConv2d(layer, Epilogue("relu")), torch.randn(1, 16, 6, 6)
    monkeypatch.setattr(module, "available", lambda _: False)
    assert torch.equal(fast(x), layer(x).relu())
    assert not StripConv2d.takes(layer)


@built
def test_inputs_of_another_type_run_through_the_layer():
    fast = StripConv2d(build_conv(16, 8, 3, "lr").eval())
    assert fast.double()(torch.randn(1, 16, 6, 6, dtype=torch.float64)).dtype == torch.float64
