"""Kernels compiled ahead: what a network will ask for is found, and compiled when it is met."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

import lowrank_cnn as lr
from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.kernels import composite_conv2d, composite_reference, forced
from lowrank_cnn.kernels.autotune.choice import surveyed
from lowrank_cnn.kernels.depthwise import ops
from lowrank_cnn.kernels.device import surveying
from lowrank_cnn.models import create_model
from tests.kernels.helpers import DEVICE, PADDING


@pytest.mark.parametrize("training", [False, True])
def test_a_survey_runs_by_torch_and_notes_what_was_asked(training: bool):
    x = torch.randn(2, 16, 6, 6, device=DEVICE)
    weights = [torch.randn(8, 16, *shape, device=DEVICE, requires_grad=training) for shape in ((3, 1), (1, 3))]
    bias = torch.randn(16, device=DEVICE)
    with forced("on"), surveying() as asked:
        y = composite_conv2d(x, weights, bias, padding=PADDING, relu=True)
    right = composite_reference(x, weights, bias, stride=(1, 1), padding=PADDING, relu=True)
    assert torch.equal(y, right)
    (one,) = asked
    assert (one.training, one.bias) == (training, torch.float32)
    assert one.problem.channels == 16
    assert [group.filters for group in one.problem.groups] == [8, 8]


def test_a_whole_network_is_surveyed_on_shapes_alone():
    net = fuse(create_model("vgg11-gmp-lr", num_classes=10, width=0.25, norm="batch").to(DEVICE).train())
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    drawn = torch.random.get_rng_state()
    with forced("on"):
        asked = surveyed(lambda: net(torch.randn(2, 3, 64, 64, device=DEVICE)))
    assert len(asked) == 8
    assert all(each.training and each.bias is None for each in asked)  # batch norm has it
    changed = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}
    assert all(name.endswith("num_batches_tracked") for name in changed)
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert torch.is_tensor(net(torch.randn(2, 3, 64, 64, device=DEVICE)))


@pytest.mark.parametrize("training", [False, True])
def test_bands_are_noted_as_calls_that_can_be_launched(training: bool):
    bands = [lr.FilterGroup(4, depthwise=True), lr.FilterGroup(1, 3, 4, depthwise=True)]
    layer = lr.CompositeConv2d(8, bands).to(DEVICE).train(training).requires_grad_(training)
    x = torch.randn(2, 8, 6, 6, device=DEVICE)
    with forced("on"):
        with surveying() as asked:
            y = layer(x)
        (one,) = asked
        assert (one.training, one.need_input, one.bias) == (training, False, (torch.Size([8]), *one.x[1:]))
        launched = []
        seen = patch.object(ops.forward, "launch", side_effect=lambda *given, **_: launched.append(given[0].shape))
        with (
            seen,
            patch.object(ops, "launch_copy"),
            patch.object(ops.weights, "launch"),
        ):
            one.compile()
    assert launched == [(1, 6, 6, 8)]
    with forced("off"):
        assert torch.equal(y, layer(x))


def test_a_network_that_needs_values_is_met_as_it_comes():
    assert surveyed(lambda: torch.ones(2).sum().item() / 0) == []


@pytest.mark.nightly
def test_what_is_compiled_ahead_is_not_compiled_again(program, monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    said, errors = program(90, "ahead").communicate(timeout=600)
    assert said, errors
    ahead, in_all = json.loads(said)
    assert (
        ahead >= 8
    )  # two forwards, what undoes the pool, the input's gradient and the weights'; and a band's three
    assert in_all == ahead
