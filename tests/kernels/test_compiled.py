"""The kernels compiled for GPUs that are not here: all compile, none spills, and they fit where they must."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program may take, by compute capability."""


@pytest.fixture
def compiled(program, monkeypatch):
    def compile_for(capability: int) -> list[dict]:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        said, errors = program(capability).communicate(timeout=600)
        assert said, errors
        return [json.loads(line) for line in said.splitlines()]

    return compile_for


@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_compiles_without_spilling(compiled, capability: int):
    kernels = compiled(capability)
    names = {row["kernel"] for row in kernels}
    assert {
        "composite_tiled",
        "composite_stem",
        "composite_gather",
        "weight_gradient",
        "undo_pool",
        "undo_relu",
    } <= names
    assert ({"composite_hopper", "weights_hopper"} <= names) == (capability == 90)
    assert [row for row in kernels if row["spilled"]] == []
    assert [row for row in kernels if row["shared"] > SHARED[capability]] == []
