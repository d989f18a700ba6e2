"""Crops, mirrors and cutouts against loops over pixels; zooms and colours by what each must keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Augment, Standardize, Whiten
from lowrank_cnn.data.augment import (
    OPERATIONS,
    PixelAugment,
    alternating,
    apply_moves,
    centre_crop,
    cut_out,
    draw_moves,
    resize_shorter,
    scaled,
)
from lowrank_cnn.data.types import generator


def slowly(images: Tensor, rows: Tensor, moves: Tensor, window: tuple[int, int], cutout: int) -> Tensor:
    """The same in loops over images and pixels."""
    out = torch.zeros(len(rows), *window, images.shape[3], dtype=images.dtype)
    for i, row in enumerate(rows.tolist()):
        top, left, mirror, cut_y, cut_x = moves[:, i].tolist()
        for y in range(window[0]):
            for x in range(window[1]):
                across = window[1] - 1 - x if mirror else x
                value = images[row, top + y, left + across]
                down, right = y - cut_y + cutout // 2, x - cut_x + cutout // 2
                cut = 0 <= down < cutout and 0 <= right < cutout
                out[i, y, x] = 0 if cut else value
    return out


@settings(max_examples=25)
@given(
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    crop=st.integers(1, 7),
    cutout=st.integers(0, 5),
    mirror=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_fused_pass_equals_loops(
    height: int, width: int, crop: int, cutout: int, mirror: bool, seed: int
) -> None:
    window = (min(crop, height), min(crop, width))
    images = torch.rand(5, height, width, 3, generator=generator("images", seed))
    rows = torch.randint(0, 5, (6,), generator=generator("rows", seed))
    moves = draw_moves(6, padded=(height, width), window=window, mirror=mirror, draw=generator("moves", seed))
    fused = apply_moves(images, rows, moves, window=window, cutout=cutout)
    assert torch.equal(fused, slowly(images, rows, moves, window, cutout))


def test_moves_reach_every_place_and_both_sides() -> None:
    moves = draw_moves(4000, padded=(10, 9), window=(8, 8), mirror=True, draw=generator(1))
    assert [found.unique().tolist() for found in moves] == [[0, 1, 2], [0, 1], [0, 1], [*range(8)], [*range(8)]]
    assert 0.45 < moves[2].float().mean() < 0.55
    assert not draw_moves(100, padded=(8, 8), window=(8, 8), mirror=False, draw=generator(1))[2].any()


def test_cut_out_zeroes_one_square_in_place() -> None:
    images = torch.ones(2, 3, 6, 6)
    centres = torch.tensor([3, 0])
    still = torch.zeros(2, dtype=torch.long)
    moves = torch.stack([still, still, still, centres, centres])
    cut = cut_out(images, moves, cutout=4)
    assert cut is images
    assert (cut[0] == 0).sum() == 3 * 16
    assert (cut[0, :, 1:5, 1:5] == 0).all()
    assert (cut[1] == 0).sum() == 3 * 4  # clipped by the corner
    assert (cut[1, :, :2, :2] == 0).all()


def test_centre_crop_of_even_and_odd_margins() -> None:
    image = torch.arange(5 * 6).view(1, 1, 5, 6)
    assert torch.equal(centre_crop(image, (3, 4)), image[..., 1:4, 1:5])
    assert torch.equal(centre_crop(image, (4, 3)), image[..., 0:4, 1:4])
    assert torch.equal(centre_crop(image, (5, 6)), image)
    for larger in ((6, 6), (5, 7)):
        with pytest.raises(LowRankError, match="does not fit images of 5x6"):
            centre_crop(image, larger)


def test_the_shorter_side_is_scaled() -> None:
    assert scaled(375, 500, 256) == (256, 341)
    assert scaled(500, 375, 256) == (341, 256)
    assert scaled(10, 20, None) == (10, 20)
    images = torch.rand(2, 3, 8, 16)
    assert resize_shorter(images, 4).shape == (2, 3, 4, 8)
    assert resize_shorter(images, None) is images
    assert torch.allclose(resize_shorter(torch.full((1, 1, 8, 8), 7.0), 3), torch.tensor(7.0))


def test_windows() -> None:
    assert Augment().window(32, 48, train=True) == (32, 48)
    assert Augment(crop=30).window(32, 32, train=False) == (30, 30)
    assert Augment(crop=32, pad=4).window(32, 32, train=True) == (32, 32)
    assert Augment(crop=224, resize=256).window(64, 80, train=True) == (224, 224)
    assert Augment(resize=16).window(32, 48, train=False) == (16, 24)
    assert Augment(crop=224).for_any_size().resize == 256
    assert Augment(crop=224, resize=240).for_any_size().resize == 240
    with pytest.raises(LowRankError, match="crop of 40 does not fit images of 32x32 padded by 3"):
        Augment(crop=40, pad=3).window(32, 32, train=True)
    with pytest.raises(LowRankError, match=r"crop of 36 does not fit images of 32x32\."):
        Augment(crop=36, pad=4).window(32, 32, train=False)


@pytest.mark.parametrize(("name", "value"), [("crop", 0), ("resize", -1), ("pad", -1), ("cutout", -2)])
def test_impossible_numbers_are_refused(name: str, value: int) -> None:
    with pytest.raises(LowRankError, match=rf"{name}.*{value}"):
        replace(Augment(), **{name: value})


def test_alternation_mirrors_every_image_every_other_epoch():
    rows = torch.randperm(100)
    first, second, third = (alternating(rows, images=100, seed=3, epoch=epoch) for epoch in (0, 1, 2))
    assert torch.equal(first, ~second)
    assert torch.equal(first, third)
    assert 20 < first.sum() < 80
    assert not torch.equal(first, alternating(rows, images=100, seed=4, epoch=0))
    again = torch.empty(100, dtype=torch.bool)
    again[rows] = first
    assert torch.equal(again, alternating(torch.arange(100), images=100, seed=3, epoch=0))


PREPROCESS = Standardize(torch.tensor([120.0, 110.0, 100.0]), torch.tensor([60.0, 50.0, 40.0]))


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.rand(6, 3, 12, 16, generator=torch.Generator().manual_seed(0))


def prepared(pixels: torch.Tensor) -> torch.Tensor:
    return PREPROCESS((pixels * 255).round().to(torch.uint8))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_stay_in_range_and_keep_shapes(name: str, pixels: torch.Tensor) -> None:
    for strength in (-1.0, -0.3, 0.0, 0.3, 1.0):
        out = OPERATIONS[name](pixels, torch.full((6,), strength))
        assert out.shape == pixels.shape
        assert out.isfinite().all()
        assert float(out.min()) >= -1e-5
        assert float(out.max()) <= 1 + 1e-5


def test_a_shift_is_a_shift(pixels: torch.Tensor) -> None:
    shifted = OPERATIONS["shift_x"](
        pixels, torch.full((6,), 2 * 4 / 16)
    )  # of 4 pixels: coordinates go from -1 to 1
    torch.testing.assert_close(shifted[..., :12], pixels[..., 4:], rtol=1e-4, atol=1e-4)


def test_equal_levels_and_solarized_ones(pixels: torch.Tensor) -> None:
    ramp = torch.linspace(0.4, 0.6, 192).view(1, 1, 12, 16)
    spread = OPERATIONS["equalize"](ramp, torch.zeros(1))
    assert (float(spread.min()), float(spread.max())) == (0.0, 1.0)
    turned = OPERATIONS["solarize"](pixels, torch.ones(6))
    torch.testing.assert_close(turned, 1 - pixels)
    grey = OPERATIONS["saturation"](pixels, torch.full((6,), -1 / 0.99))
    torch.testing.assert_close(grey[:, 0], grey[:, 1])


@pytest.mark.parametrize("augment", [PixelAugment(zoom=0.5), PixelAugment(jitter=0.4), PixelAugment(auto="rand")])
def test_draws_depend_on_the_keys_alone_and_differ_between_images(
    augment: PixelAugment, pixels: torch.Tensor
) -> None:
    same = prepared(pixels[:1]).expand(6, -1, -1, -1).contiguous(memory_format=torch.channels_last)
    one, again, other = (augment(same, PREPROCESS, *keys) for keys in ((0, 1), (0, 1), (0, 2)))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.is_contiguous(memory_format=torch.channels_last)
    assert len({float(image.sum()) for image in one}) > 3


def test_images_come_back_as_they_were_where_nothing_moves(pixels: torch.Tensor) -> None:
    images = prepared(pixels)
    torch.testing.assert_close(PixelAugment(jitter=1e-9)(images, PREPROCESS, 0), images, rtol=1e-4, atol=1e-4)
    assert not PixelAugment().active


def test_whitened_images_are_refused() -> None:
    with pytest.raises(LowRankError, match="standardize"):
        PixelAugment(jitter=0.1).check(Whiten(torch.zeros(4), torch.eye(4)))
