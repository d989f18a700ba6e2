"""Random zooms, colours and automatic augmentation: against torch's and by what each operation must keep."""

from __future__ import annotations

import pytest
import torch

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Standardize, Whiten
from lowrank_cnn.data.mixes import OPERATIONS, PixelAugment

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


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"posterize", "solarize", "autocontrast", "equalize"}))
def test_no_strength_is_no_change(name: str, pixels: torch.Tensor) -> None:
    torch.testing.assert_close(OPERATIONS[name](pixels, torch.zeros(6)), pixels, rtol=1e-4, atol=1e-4)


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
