"""The fetches of the Hopper kernel, over a small model of the hardware: weights that stay, and strides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.hopper_plan import HopperTile, unsupported
from lowrank_cnn.kernels.conv.pack import pack_rows
from lowrank_cnn.kernels.problem import ConvTensors
from lowrank_cnn.kernels.reference import composite_reference


@pytest.fixture
def emulated(monkeypatch, hopper_model):
    return hopper_model.emulate(monkeypatch)


STAYING = [
    pytest.param((2, 24, 9, 7), [(3, 1, 16), (1, 3, 40)], (1, 1), 2, id="odd size, ragged groups"),
    pytest.param((3, 40, 8, 8), [(3, 1, 16), (1, 3, 16), (3, 3, 32)], (1, 1), 3, id="groups of several runs"),
    pytest.param((2, 40, 7, 5), [(1, 1, 48)], (1, 1), 4, id="pointwise"),
    pytest.param((4, 32, 12, 20), [(3, 1, 16), (1, 3, 16)], (2, 2), 2, id="stride 2"),
]


@pytest.mark.parametrize(("size", "groups", "stride", "boxes"), STAYING)
def test_weights_that_stay_are_fetched_once(emulated, hopper_model, size, groups, stride, boxes):
    x, weights, bias, options, problem = hopper_model.posed(size, groups, stride, "relu")
    tile = HopperTile(pixels=32, filters=16, depth=16, boxes=boxes, slabs=0, parts=1, residents=1)
    hopper_model.poison(emulated)
    y = emulated.launch_hopper(problem, ConvTensors(x, pack_rows(weights, x.dtype), bias), tile)
    exact = composite_reference(x.double(), [w.double() for w in weights], bias.double(), **options)
    assert torch.linalg.norm(y - exact) < 1e-5 * torch.linalg.norm(exact)
    ring = emulated.machine.fetched
    emulated.machine.fetched = 0
    emulated.launch_hopper(
        problem, ConvTensors(x, pack_rows(weights, x.dtype), bias), replace(tile, boxes=2, slabs=2)
    )
    assert ring < emulated.machine.fetched


STRIDED = [
    pytest.param((2, 16, 8, 6), [(3, 1, 16), (1, 3, 24)], (2, 2), 2, 2, id="low-rank, ragged groups"),
    pytest.param((1, 48, 12, 8), [(3, 3, 32)], (2, 2), 3, 3, id="dense"),
    pytest.param((3, 32, 6, 10), [(1, 1, 16)], (2, 2), 4, 4, id="pointwise"),
    pytest.param((1, 16, 8, 7), [(7, 1, 16), (1, 7, 16)], (2, 1), 2, 2, id="rows only, seven taps"),
]


@pytest.mark.parametrize(("size", "groups", "stride", "boxes", "slabs"), STRIDED)
def test_a_stride_reads_the_image_in_place(emulated, hopper_model, size, groups, stride, boxes, slabs):
    x, weights, bias, options, problem = hopper_model.posed(size, groups, stride, "hardswish")
    assert unsupported(replace(problem, dtype=torch.bfloat16)) is None
    tile = HopperTile(pixels=32, filters=16, depth=16, boxes=boxes, slabs=slabs, parts=1)
    hopper_model.poison(emulated)
    y = emulated.launch_hopper(problem, ConvTensors(x, pack_rows(weights, x.dtype), bias), tile)
    exact = composite_reference(x.double(), [w.double() for w in weights], bias.double(), **options)
    assert torch.linalg.norm(y - exact) < 1e-5 * torch.linalg.norm(exact)
