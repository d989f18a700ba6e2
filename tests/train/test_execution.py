"""How steps execute: kept in the record, and the same when a run is resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowrank_cnn.method.schemes import build_conv
from lowrank_cnn.models import create_model


def test_the_record_says_how_steps_ran_and_a_resumed_run_reads_it(driver, tmp_path):
    _, record = driver.train(tmp_path / "run", driver.PLAIN)
    assert record.execution == {"compiled": False, "cuda_graph": False}
    _, again = driver.train(tmp_path / "run", driver.PLAIN, epochs=4, resume=True)
    assert again.execution == record.execution


def test_a_compiled_run_is_the_run_without_and_is_resumed_compiled(driver, monkeypatch, tmp_path):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda net, **_: compile(net, backend="aot_eager"))
    plain, one = driver.train(None, driver.PLAIN, compile=False)
    compiled, other = driver.train(tmp_path / "run", driver.PLAIN, compile=True)
    assert other.execution["compiled"]
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    assert other.result["loss"] == pytest.approx(one.result["loss"], rel=1e-4)
    for how, expected in ((None, True), (False, False)):
        _, again = driver.train(tmp_path / "run", driver.PLAIN, epochs=5 - expected, resume=True, compile=how)
        assert again.execution["compiled"] is expected


def low_rank_network(name: str) -> nn.Module:
    """One of our networks, or "chains": a layer of each scheme that makes a chain."""
    if name != "chains":
        return create_model(name, num_classes=5, width=0.1, norm="batch")
    convs = [build_conv(3, 8, 3, "lr-join"), build_conv(8, 8, 3, "separable")]
    blocks = [part for conv in convs for part in (conv, nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))]
    return nn.Sequential(*blocks, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, 5))


LARGE = [(name, fused) for name in ("nin-c3-lr", "vgg11-gmp-lr-join", "googlenet-lr") for fused in (False, True)]
BY_NIGHT = [pytest.param(*pair, marks=pytest.mark.nightly) for pair in (("chains", False), *LARGE)]


@pytest.mark.parametrize(("name", "fused"), [("chains", True), *BY_NIGHT])
def test_our_layers_have_no_graph_break(name, fused):
    from lowrank_cnn.graph.fuse import fuse

    torch.compiler.reset()  # classes of which other tests compiled many networks are no longer compiled
    net = low_rank_network(name).train()
    x = torch.randn(2, 3, 64, 64)

    def compiled() -> Any:  # a fused copy keeps the mode that the network has now
        return torch.compile(fuse(net) if fused else net, backend="aot_eager", fullgraph=True)

    net.eval()
    torch.testing.assert_close(compiled()(x), net(x), rtol=1e-4, atol=1e-5)
    net.train()
    found = compiled()(x)
    sum(part.sum() for part in (found if isinstance(found, tuple) else (found,))).backward()
    assert all(p.grad is not None for p in net.parameters())
