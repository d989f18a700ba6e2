"""Weights of several groups copied between layouts in one launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv import pack as packing
from lowrank_cnn.kernels.conv.copies import MOST_GROUPS, launch_copy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(8, 24, 3, 1), (40, 24, 1, 3), (5, 24, 3, 3), (16, 24, 1, 1)]


def groups(count):
    """Weights in several layouts, of values that bfloat16 holds: Triton's interpreter does not round, but cuts."""
    kinds = [torch.contiguous_format, torch.channels_last]
    return [
        torch.randn(shape, device=DEVICE).bfloat16().float().contiguous(memory_format=kinds[place % 2])
        for place, shape in enumerate(SHAPES[:count])
    ]


@pytest.mark.parametrize("count", range(1, MOST_GROUPS + 1))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_arrives_and_nothing_else_is_touched(count, dtype):
    sources = groups(count)
    whole = [torch.full((s[2], s[3], s[1] + 2, s[0] + 3), 7.0, device=DEVICE, dtype=dtype) for s in SHAPES[:count]]
    targets = [memory[:, :, 1:-1, 2:-1].permute(3, 2, 0, 1) for memory in whole]
    launch_copy(*sources, targets=targets)
    for source, target, memory in zip(sources, targets, whole, strict=True):
        assert torch.equal(target, source.to(dtype))
        assert (memory[:, :, 0] == 7).all()
        assert (memory[..., -1] == 7).all()


def test_more_groups_are_copied_one_by_one():
    sources = [torch.randn(2, 3, 1, 1, device=DEVICE) for _ in range(MOST_GROUPS + 1)]
    targets = [torch.empty_like(source) for source in sources]
    packing.copy_groups(sources, targets)
    assert all(map(torch.equal, sources, targets))


def by_kernel(sources, targets):
    launch_copy(*sources, targets=targets)


def test_packing_by_the_kernel_is_packing_by_torch(monkeypatch):
    weights = groups(3)
    here = [weight.cpu() for weight in weights]
    packed = packing.pack_rows(weights, torch.bfloat16, by_kernel)
    assert torch.equal(packed.cpu(), packing.pack_rows(here, torch.bfloat16))
    exact = packing.pack_turned(here, [0, 3, 1], torch.bfloat16)
    monkeypatch.setattr(packing, "copy_groups", by_kernel)
    assert torch.equal(packing.pack_turned(weights, [0, 3, 1], torch.bfloat16).cpu(), exact)
