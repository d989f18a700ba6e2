"""Lookups of measured plans: keys that tell problems apart, and entries that still hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.autotune import store, table
from lowrank_cnn.kernels.autotune.support import Request
from lowrank_cnn.kernels.problem import pose

CUDA = torch.device("cuda")


def problem(**options):
    groups, padding = ((24, 16, 3, 1), (24, 16, 1, 3)), (((1, 1), (0, 0)), ((0, 0), (1, 1)))
    return pose((2, 16, 8, 8), groups, torch.bfloat16, stride=(1, 1), padding=padding, **options)


@pytest.mark.parametrize(
    "change", [{"residual": True}, {"activation": "silu"}, {"pool": "floor"}, {"stride": (2, 2)}, {"batch": 3}]
)
def test_problems_that_differ_have_keys_that_differ(change):
    one, other = (Request(each, CUDA) for each in (problem(), replace(problem(), **change)))
    assert table.key_of(one) != table.key_of(other)
    assert table.key_of(one) != table.key_of(replace(one, training=True))


@pytest.mark.parametrize("plan", ["gone-p128-f64", "hopper-p1-f2-d3-w4-b5-s6-p7-r8-x9"])
def test_a_plan_of_another_version_is_passed_over(monkeypatch, plan):
    monkeypatch.setattr(store, "find", lambda _: {"plan": plan})
    assert table.entry_of(Request(problem(), CUDA)) is None


def test_a_stored_plan_that_its_kernel_no_longer_takes_is_passed_over(monkeypatch):
    odd = problem(pool="floor")
    entry = {"plan": "hopper-p128"}
    monkeypatch.setattr(store, "find", lambda _: entry)
    monkeypatch.setattr(table, "key_of", str)
    assert table.entry_of(Request(odd, torch.device("cuda"))) is None
    assert table.entry_of(Request(replace(odd, pool=None), torch.device("cuda"))) is entry
