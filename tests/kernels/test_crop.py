"""Crops by the kernel are those by indexing, to the last bit."""

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.data.augment import apply_moves, draw_moves
from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.crop import launch_crop

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
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
    places = (moves.top, moves.left, moves.mirror, moves.cut_y, moves.cut_x)
    ours = launch_crop(images, rows, *places, window=window, cutout=cutout)
    assert torch.equal(ours, right)
    assert 0 < moves.mirror.sum() < len(rows)


def test_augmentation_takes_the_kernel_where_kernels_run(monkeypatch):
    taken = []
    monkeypatch.setattr("lowrank_cnn.kernels.crop.launch_crop", lambda *a, **k: taken.append(k) or torch.zeros(1))
    images, rows = torch.zeros(2, 4, 4, 3, device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    moves = draw_moves(2, padded=(4, 4), window=(4, 4), mirror=True, draw=torch.Generator()).to(DEVICE)
    with forced("on"):
        apply_moves(images, rows, moves, window=(4, 4))
    assert taken == [{"window": (4, 4), "cutout": 0}]
