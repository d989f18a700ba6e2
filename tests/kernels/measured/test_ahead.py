"""Kernels compiled ahead: what a network will ask for is found, and compiled when it is met."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels import composite_conv2d, composite_reference, forced
from lowrank_cnn.kernels.mode import surveying

PADDING = [((1, 1), (0, 0)), ((0, 0), (1, 1))]


@pytest.mark.parametrize("training", [False, True])
def test_a_survey_runs_by_torch_and_notes_what_was_asked(training: bool):
    x = torch.randn(2, 16, 6, 6)
    weights = [torch.randn(8, 16, *shape, requires_grad=training) for shape in ((3, 1), (1, 3))]
    with forced("on"), surveying() as asked:
        y = composite_conv2d(x, weights, None, padding=PADDING, relu=True)
    right = composite_reference(x, weights, None, stride=(1, 1), padding=PADDING, relu=True)
    assert torch.equal(y, right)
    (one,) = asked
    assert one.training is training
    assert one.problem.channels == 16
    assert [group.filters for group in one.problem.groups] == [8, 8]


def test_what_is_compiled_ahead_is_not_compiled_again(program, monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    said, errors = program(90, "ahead").communicate(timeout=300)
    assert said, errors
    ahead, in_all = json.loads(said)
    assert ahead >= 5  # two forwards, and what undoes the pool, the input's gradient and the weights'
    assert in_all == ahead
