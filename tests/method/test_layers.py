import copy
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.spec import FilterGroup

SIZES = st.integers(1, 5)


@st.composite
def layers(draw: st.DrawFn) -> CompositeConv2d:
    channel_groups = draw(st.sampled_from([1, 1, 2, 3]))
    groups = draw(st.lists(st.tuples(SIZES, SIZES, st.integers(1, 3)), min_size=1, max_size=4))
    mode = draw(st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]))
    layer = CompositeConv2d(
        channel_groups * draw(st.integers(1, 3)),
        [(h, w, n * channel_groups) for h, w, n in groups],
        stride=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        dilation=draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        padding=draw(st.sampled_from(["same", "valid", 0, 1, (2, 0)])),
        channel_groups=channel_groups,
        padding_mode=mode,
        bias=draw(st.booleans()),
        dtype=torch.float64,
    )
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    return layer


@settings(max_examples=80)
@given(layers(), st.integers(9, 14), st.integers(9, 14))
def test_a_composite_equals_its_dense_view(layer: CompositeConv2d, height: int, width: int):
    x = torch.randn(2, layer.in_channels, height, width, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.dense_view()(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_composite_equals_plain_convs_side_by_side(stride: int):
    layer = CompositeConv2d(6, [(3, 1, 4), (1, 3, 5), (3, 3, 2)], stride=stride).double()
    x = torch.randn(2, 6, 11, 8, dtype=torch.float64)
    biases = layer.bias.split([4, 5, 2])
    pads = [(1, 0), (0, 1), (1, 1)]
    plain = [
        F.conv2d(x, w, b, stride=stride, padding=p) for w, b, p in zip(layer.weights, biases, pads, strict=True)
    ]
    torch.testing.assert_close(layer(x), torch.cat(plain, dim=1), rtol=0, atol=0)


def test_the_state_dict_is_as_documented():
    layer = CompositeConv2d(4, [(3, 1, 6), (1, 3, 2)], channel_groups=2)
    assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == {
        "weights.0": (6, 2, 3, 1),
        "weights.1": (2, 2, 1, 3),
        "bias": (8,),
    }
    assert "bias" not in CompositeConv2d(4, [(3, 1, 6)], bias=False).state_dict()


@pytest.fixture
def layer() -> CompositeConv2d:
    torch.manual_seed(0)
    return CompositeConv2d(4, [(3, 1, 6), (1, 3, 2)], stride=2)


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randn(2, 4, 9, 7, generator=torch.Generator().manual_seed(1))


def test_it_works_unbatched(layer: CompositeConv2d, image: torch.Tensor):
    torch.testing.assert_close(layer(image[0]), layer(image)[0])


def test_it_works_under_autocast(layer: CompositeConv2d, image: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(image)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(image), rtol=0.05, atol=0.05)


def test_it_works_in_channels_last(layer: CompositeConv2d, image: torch.Tensor):
    last = copy.deepcopy(layer).to(memory_format=torch.channels_last)
    out = last(image.to(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out, layer(image))


def test_gradients_reach_every_parameter(image: torch.Tensor):
    layer = CompositeConv2d(4, [(3, 1, 2), (1, 3, 1)], stride=2).double()
    assert torch.autograd.gradcheck(layer, (image[:1].double().requires_grad_(),))
    layer(image.double()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


@pytest.mark.parametrize("depthwise", [False, True])
def test_it_trains_under_ddp(tmp_path, layer: CompositeConv2d, image: torch.Tensor, depthwise: bool):
    if depthwise:
        layer = CompositeConv2d(4, [FilterGroup(3, 3, 2, depthwise=True), FilterGroup(1, 5, 2, depthwise=True)])
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(layer)
        wrapped(image).sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
        # gloo's thread needs Python's lock to drop what it has done; to free the group before would wait for ever.
        time.sleep(0.2)
    finally:
        torch.distributed.destroy_process_group()


def test_it_says_what_it_is():
    layer = CompositeConv2d(4, [(3, 1, 6), (1, 3, 2)], stride=2)
    assert repr(layer) == "CompositeConv2d(4, 8, 6 of 3x1 + 2 of 1x3, stride=(2, 2), padding=1)"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CompositeConv2d(0, [(3, 1, 4)]), "in_channels"),
        (lambda: CompositeConv2d(4, []), "at least one filter group"),
        (lambda: CompositeConv2d(4, [(3, 1, -4)]), "positive"),
        (lambda: CompositeConv2d(4, [(3, 1, 4)], channel_groups=3), "4 input channels cannot be divided"),
        (lambda: CompositeConv2d(4, [(3, 1, 3)], channel_groups=2), "filter group 3x1,3 does not divide"),
        (lambda: CompositeConv2d(4, [(3, 1, 4)], stride=0), "stride is a positive number"),
        (lambda: CompositeConv2d(4, [(3, 1, 4)], padding="full"), "padding is"),
        (lambda: CompositeConv2d(4, [(3, 1, 4)], padding=-1), "cannot be negative"),
        (lambda: CompositeConv2d(4, [(3, 1, 4)], padding_mode="mirror"), "padding_mode must be zeros or"),
        (lambda: CompositeConv2d(4, [(3, 1, 4)], padding=((1,), (2,))), "padding is"),
        (lambda: CompositeConv2d(4, [(3, 1, 4)], stride=1.5), "stride is a positive number"),
        (lambda: CompositeConv2d(4, 5), "groups of a composite"),
        (
            lambda: CompositeConv2d(1, [(7, 1, 4)], padding_mode="reflect")(torch.randn(1, 1, 3, 3)),
            "reflect padding of .* is larger than an input of 3x3",
        ),
        (lambda: CompositeConv2d(4, [(3, 1, 4)])(torch.randn(1, 3, 8, 8)), "not an input of shape"),
        (lambda: CompositeConv2d(4, [(3, 1, 4)])(torch.randn(4, 8)), "not an input of shape"),
        (
            lambda: CompositeConv2d(4, [(7, 1, 4)], padding=0)(torch.randn(1, 4, 5, 5)),
            "do not fit an input of 5x5",
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(make, says: str):
    with pytest.raises(LowRankError, match=says):
        make()
