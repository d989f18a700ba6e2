"""What was measured is found again: keys that tell problems apart, and entries that are still valid."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.autotune import tuned
from lowrank_cnn.kernels.autotune.tuned import Request
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
    assert tuned.key_of(one) != tuned.key_of(other)
    assert tuned.key_of(one) != tuned.key_of(replace(one, training=True))


def entry(plan: str = "gather-p64-f64-d32-w4-s2", **changes):
    times = {"graph": 0.5, "call": float("inf")}
    return {"torch": times, "fused": times, "plan": plan, "tuned": False} | changes


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """A file of its own for what is measured, read anew."""
    monkeypatch.setenv("LOWRANK_CACHE", str(tmp_path))
    tuned.entries.cache_clear()
    yield
    tuned.entries.cache_clear()
    tuned._this_run.clear()


@pytest.mark.parametrize("lasting", [True, False])
def test_an_entry_is_found_again(stored, lasting):
    request = Request(problem(), CUDA)
    tuned.keep(request, entry(), lasting=lasting)
    assert tuned.entry_of(request) == entry()
    assert tuned.entry_of(Request(problem(), torch.device("cpu"))) is None
    tuned.entries.cache_clear()
    tuned._this_run.clear()
    assert tuned.entry_of(request) == (entry() if lasting else None)


@pytest.mark.parametrize(
    "broken",
    [
        entry("gone-p128-f64"),
        entry("hopper-p1-f2-d3-w4-b5-s6-p7-r8-x9"),
        entry(plan=3),
        entry(tuned=1),
        entry(torch={"graph": -1.0, "call": 1.0}),
        entry(torch={"graph": float("nan"), "call": 1.0}),
        entry(fused={"graph": 1.0}),
        entry(fused=None),
        ["gather"],
    ],
)
def test_what_is_no_entry_is_left_out(stored, broken):
    tuned.entries()[tuned.key_of(Request(problem(), CUDA))] = broken
    tuned.entries().save()
    tuned.entries.cache_clear()
    assert tuned.entry_of(Request(problem(), CUDA)) is None


def test_a_stored_plan_that_its_kernel_no_longer_takes_is_passed_over(stored):
    odd, plan = problem(pool="floor"), "hopper-p128-f16-d16-w4-b2-s3-p1-r2"
    for each in (odd, problem()):
        tuned.keep(Request(each, CUDA), entry(plan), lasting=True)
    assert tuned.entry_of(Request(odd, CUDA)) is None
    assert tuned.entry_of(Request(problem(), CUDA)) == entry(plan)


def test_a_plan_measured_for_training_serves_inference(stored, monkeypatch):
    monkeypatch.setattr(tuned, "plans_of", lambda *_: ("default",))
    assert tuned.plan_for(problem(), CUDA) == "default"
    tuned.keep(Request(problem(), CUDA, training=True), entry(tuned=True), lasting=True)
    assert str(tuned.plan_for(problem(), CUDA)) == entry()["plan"]
    assert str(tuned.tuned_plan(problem(), CUDA)) == entry()["plan"]
