"""The compiled operator against convs in float64: sizes, directions, types, layouts, and what follows."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowrank_cnn.core.errors import MissingExtra
from lowrank_cnn.kernels import strips as module
from lowrank_cnn.kernels.strips import available, is_installed, packed_strips, strips

LIMITS = {torch.float32: 1e-5, torch.float16: 3e-2}
SIZES = [
    (1, 1, 1, 1, 1),
    (2, 3, 5, 7, 9),
    (3, 33, 17, 13, 1),
    (1, 40, 9, 1, 31),
    (2, 64, 24, 25, 26),
    (1, 70, 8, 6, 64),
]


@pytest.fixture(params=[torch.float32, torch.float16], ids=["float32", "float16"])
def dtype(request) -> torch.dtype:
    if not is_installed():
        pytest.skip("lowrank-strips is not built: `make strips`")
    if not available(request.param):
        pytest.skip(f"this processor does not compute in {request.param}")
    return request.param


def case(
    images: int, channels: int, filters: int, *size: int, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Maps, the weights of two groups (1x3 and 3x1) and their bias."""
    drawn = torch.Generator().manual_seed(0)
    shapes = [(filters, channels, 1, 3), (filters + 1, channels, 3, 1)]
    weights = [(torch.randn(shape, generator=drawn) / (3 * channels) ** 0.5).to(dtype) for shape in shapes]
    x = torch.randn(images, channels, *size, generator=drawn).to(dtype)
    return x, weights, torch.randn(2 * filters + 1, generator=drawn).to(dtype)


def expected(x: Tensor, weights: list[Tensor], bias: Tensor, relu: bool) -> Tensor:
    x, bias, (across, down) = x.double(), bias.double(), [weight.double() for weight in weights]
    y = (
        torch.cat([F.conv2d(x, across, padding=(0, 1)), F.conv2d(x, down, padding=(1, 0))], 1)
        + bias[:, None, None]
    )
    return y.relu() if relu else y


def found(x: Tensor, weights: list[Tensor], bias: Tensor, relu: bool, pool: bool = False) -> Tensor:
    made = [packed_strips(weight) for weight in weights]
    return strips(x, made, bias, [len(weight) for weight in weights], [True, False], relu, pool)


def assert_near(ours: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), right, rtol=0, atol=LIMITS[dtype] * float(right.abs().max() + 1))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_any_size_in_both_directions(sizes, threads: int, dtype: torch.dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for relu in (False, True):
            given = case(*sizes, dtype=dtype)
            assert_near(found(*given, relu), expected(*given, relu), dtype)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [(2, 2), (4, 30), (28, 6), (16, 14)], ids=str)
def test_a_pool_keeps_the_largest_of_four(size, dtype: torch.dtype):
    given = case(2, 20, 9, *size, dtype=dtype)
    whole = found(*given, relu=True)
    assert torch.equal(found(*given, relu=True, pool=True), F.max_pool2d(whole.float(), 2).to(dtype))


def test_any_memory_format(dtype: torch.dtype):
    x, weights, bias = case(2, 32, 8, 10, 12, dtype=dtype)
    right = expected(x, weights, bias, relu=True)
    turned = x.transpose(2, 3).contiguous().transpose(2, 3)
    for laid_out in (x.contiguous(memory_format=torch.channels_last), turned, x.repeat(1, 1, 1, 2)[..., :12]):
        assert_near(found(laid_out, weights, bias, relu=True), right, dtype)


def test_nan_is_not_rectified(dtype: torch.dtype):
    x, weights, bias = case(1, 16, 8, 8, 8, dtype=dtype)
    x[0, 3, 4, 4] = float("nan")
    for pool in (False, True):
        assert found(x, weights, bias, relu=True, pool=pool).isnan().any()


def test_torch_can_trace_and_compile_it(dtype: torch.dtype):
    x, weights, bias = case(1, 16, 8, 8, 8, dtype=dtype)
    for relu, pool in itertools.product((False, True), repeat=2):
        arguments = (x, [packed_strips(weight) for weight in weights], bias, [8, 9], [True, False], relu, pool)
        assert set(torch.library.opcheck(torch.ops.lowrank.strips.default, arguments).values()) == {"SUCCESS"}


def test_arrays_of_other_shapes_are_refused(dtype: torch.dtype):
    x, weights, bias = case(1, 16, 8, 8, 8, dtype=dtype)
    with pytest.raises(ValueError, match="packed has another size"):
        found(x[:, :15], weights, bias, relu=False)
    other = packed_strips(weights[0]).to(torch.float16 if dtype == torch.float32 else torch.float32)
    with pytest.raises(ValueError, match="differ in type"):
        strips(x, [other], bias[:8], [8], [True], False, False)
    with pytest.raises(ValueError, match="differ in size"):
        found(x[:, :, :7], weights, bias, relu=False, pool=True)


def test_without_the_package_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(module, "is_installed", lambda: False)
    module.library.cache_clear()
    try:
        assert not available(torch.float32)
        with pytest.raises(MissingExtra, match=r"pip install \./native"):
            packed_strips(torch.randn(4, 4, 1, 3))
    finally:
        module.library.cache_clear()
