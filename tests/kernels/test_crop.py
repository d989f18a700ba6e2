"""Crops by the kernel are those by indexing, to the last bit."""

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.data.augment import ByteScale, apply_moves, draw_moves
from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.crop import launch_crop
from tests.kernels.helpers import DEVICE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(
    ("padded", "window", "channels", "cutout"),
    [((11, 13), (8, 9), 3, 0), ((8, 8), (8, 8), 1, 3), ((9, 600), (5, 512), 3, 4), ((7, 5), (1, 1), 2, 1)],
)
def test_crops_are_those_of_indexing(padded, window, channels, cutout, dtype):
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (6, *padded, channels), generator=draw).to(DEVICE, dtype)
    rows = torch.tensor([5, 0, 3, 3, 1, 2, 4, 4, 0, 5], device=DEVICE)
    moves = draw_moves(len(rows), padded=padded, window=window, mirror=True, draw=draw).to(DEVICE)
    with forced("off"):
        right = apply_moves(images, rows, moves, window=window, cutout=cutout)
    ours = launch_crop(images, rows, *moves, window=window, cutout=cutout)
    assert torch.equal(ours, right)
    assert 0 < moves[2].sum() < len(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("pad", "cutout", "statistics"), [(0, 0, 3), (2, 0, 3), (2, 3, 1)])
def test_bytes_are_scaled_with_the_crop(pad, cutout, statistics, dtype):
    draw = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (4, 12, 14, 3), generator=draw, dtype=torch.uint8).to(DEVICE)
    rows = torch.tensor([3, 0, 1, 2, 2, 3], device=DEVICE)
    moves = draw_moves(len(rows), padded=(12, 14), window=(10, 11), mirror=True, draw=draw).to(DEVICE)
    mean, std = (torch.rand(statistics, generator=draw).mul(200).add(1).to(DEVICE) for _ in range(2))
    options = {"window": (10, 11), "cutout": cutout, "scale": ByteScale(mean, std, pad, dtype)}
    with forced("off"):
        right = apply_moves(images, rows, moves, **options)
    with forced("on"):
        ours = apply_moves(images, rows, moves, **options)
    assert ours.dtype == dtype
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":  # where Triton's interpreter cuts digits off
        torch.testing.assert_close(ours, right, rtol=2**-7, atol=0)
    else:
        assert torch.equal(ours, right)
    assert (right == 0).any() or not (pad or cutout)


def test_augmentation_takes_the_kernel_where_kernels_run(monkeypatch):
    taken = []
    monkeypatch.setattr("lowrank_cnn.kernels.crop.launch_crop", lambda *a, **k: taken.append(k) or torch.zeros(1))
    images, rows = torch.zeros(2, 4, 4, 3, device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    moves = draw_moves(2, padded=(4, 4), window=(4, 4), mirror=True, draw=torch.Generator()).to(DEVICE)
    with forced("on"):
        apply_moves(images, rows, moves, window=(4, 4))
    assert [(call["window"], call["cutout"], call["scaling"]) for call in taken] == [((4, 4), 0, None)]
