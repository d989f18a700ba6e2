"""Answers that torch.compile takes as constants."""

from __future__ import annotations

import torch

from lowrank_cnn.kernels import device as availability
from lowrank_cnn.kernels import forced, torch_compile
from lowrank_cnn.kernels.device import survey, surveying


def test_what_torch_compile_takes_down_is_not_surveyed(monkeypatch):
    monkeypatch.setattr(torch_compile.choice, "plan_text", lambda *_: survey() is None)
    with surveying():
        assert torch_compile.plan_text()
        assert survey() == []


def test_a_survey_does_not_switch_compiled_kernels_off(monkeypatch):
    monkeypatch.setattr(availability, "_able", lambda device: True)
    asked = ((1, 2, 3, 4), torch.float32, torch.device("cuda"))
    with forced("on"), surveying():
        assert torch_compile.takes(*asked)
        assert not availability.takes(*asked)


def test_nothing_is_exported_here():
    assert not torch_compile.exporting()
