"""Gradients of every kernel against float64, and which kernels compute them on which GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.conv import backward, equivalent, gradients, hopper_plan, hopper_weights, stem, window
from lowrank_cnn.kernels.conv.hopper_plan import WindowTile
from lowrank_cnn.kernels.conv.plans import KernelPlan
from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.problem import pose
from lowrank_cnn.kernels.reference import composite_by_torch, composite_reference
from tests.kernels.helpers import assert_close, posed, same, winners

SMALL = Tile(32, 16, 16)
LOW_RANK = [(3, 1, 8), (1, 3, 8)]


def last(x):
    return x.detach().permute(0, 2, 3, 1).contiguous()


def seen_by(layer):
    """What a forward leaves for the backward: the codes of a pool, else the result."""
    if layer.problem.pool is None:
        return last(layer.right).float()
    return winners(layer).to(torch.uint8).contiguous()


def assert_gradients(layer, need_input=True):
    dx, dw, db = gradients.compute_gradients(
        layer.problem, layer.grad, layer.x, layer.weights, seen_by(layer), need_input=need_input
    )
    right, *rest = layer.gradients
    for ours, exact in zip([db, *dw], rest, strict=True):
        assert_close(ours, exact)
    if need_input:
        assert_close(dx, right)


CASES = [
    pytest.param((2, 24, 9, 7), [(3, 1, 16), (1, 3, 8)], {}, id="odd size"),
    pytest.param((1, 16, 6, 10), [(3, 1, 8), (1, 3, 8), (3, 3, 8)], {"pool": "floor"}, id="mixture, pool"),
    pytest.param((2, 8, 7, 5), LOW_RANK, {"pool": "ceil"}, id="clipped windows"),
    pytest.param((1, 8, 7, 5), [(5, 1, 8), (1, 5, 12)], {"pool": "floor"}, id="dropped row, ragged groups"),
    pytest.param((2, 16, 5, 6), [(1, 1, 24)], {}, id="pointwise"),
    pytest.param((2, 8, 6, 5), [(3, 1, 6), (1, 3, 38), (3, 3, 4)], {}, id="groups that begin within 16 bytes"),
    pytest.param((2, 64, 8, 8), [(3, 1, 16), (1, 3, 16)], {"stride": (2, 2)}, id="a residual block begins"),
    pytest.param((1, 64, 7, 9), [(1, 1, 32)], {"stride": (2, 2)}, id="a shortcut: most pixels get nothing"),
    pytest.param((1, 64, 6, 5), [(3, 1, 8), (1, 1, 12), (1, 3, 8)], {"stride": (2, 2)}, id="no neighbours"),
    pytest.param((2, 3, 11, 9), [(7, 7, 16)], {"stride": (2, 2)}, id="first layer of GoogLeNet, in blocks"),
    pytest.param((2, 3, 8, 8), [(7, 1, 8), (1, 7, 8)], {"stride": (2, 2), "pool": "floor"}, id="blocks, pool"),
    pytest.param((1, 24, 6, 6), LOW_RANK, {"stride": (2, 1), "pool": "ceil"}, id="uneven stride"),
]


@pytest.mark.parametrize(("size", "groups", "options"), CASES)
def test_all_gradients(monkeypatch, size, groups, options):
    monkeypatch.setattr(gradients, "_input_tile", lambda *_: SMALL)
    monkeypatch.setattr(gradients, "_weight_tile", lambda *_: SMALL)
    assert_gradients(posed(size, groups, relu=True, **options))


@pytest.mark.parametrize(("pool", "stride"), [("floor", 1), ("ceil", 2), (None, 1), (None, 2)])
def test_a_first_layer_needs_no_gradient_of_its_images(pool, stride):
    layer = posed((2, 3, 9, 11), LOW_RANK, relu=True, pool=pool, stride=(stride, stride))
    assert_gradients(layer, need_input=False)


SIZES = st.tuples(st.integers(1, 2), st.sampled_from([64, 80]), st.integers(3, 9), st.integers(3, 9))
GROUPS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([4, 8, 24])), min_size=1, max_size=3
)


@given(SIZES, st.sampled_from([(2, 2), (2, 1), (1, 2), (3, 2)]), GROUPS)
@settings(max_examples=2)
def test_any_groups_at_any_stride_without_copies(size, stride, groups):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equivalent, "fold_pixels", None)
        assert_gradients(posed(size, groups, stride=stride))


@given(
    side=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    taps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 3))] * 2),
    stride=st.sampled_from([(2, 2), (1, 2), (2, 1), (1, 1)]),
    channels=st.integers(1, 5),
)
@settings(max_examples=20)
def test_a_conv_over_blocks_of_pixels_is_the_same(side, taps, padding, stride, channels):
    x = torch.randn(2, channels, *side, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, channels, *taps, dtype=torch.float64, requires_grad=True)
    problem = pose(x.shape, [weight.shape], x.dtype, stride=stride, padding=[padding])
    inner = equivalent.folded(problem)
    if inner is None:  # whole already
        assert (stride, channels % 2) == ((1, 1), 0)
        return
    right = composite_reference(x, [weight], None, stride=stride, padding=[padding])
    grad = torch.randn_like(right)
    exact = torch.autograd.grad(right, [x, weight], grad)
    blocks = equivalent.fold_pixels(x.detach(), stride).requires_grad_()
    filters = equivalent.folded_weights([weight.detach()], problem)[0].contiguous().requires_grad_()
    assert blocks.shape == (2, inner.channels, inner.height, inner.width)
    ours = composite_by_torch(blocks, [filters], None, stride=(1, 1), padding=inner.padding)
    torch.testing.assert_close(ours, right)
    dx, dw = torch.autograd.grad(ours, [blocks, filters], grad)
    torch.testing.assert_close(equivalent.unfold_pixels(dx, problem), exact[0])
    torch.testing.assert_close(equivalent.unfold_weights(dw, problem.groups[0], stride, channels), exact[1])


@pytest.mark.parametrize(("kernel", "padding"), [((3, 3), 1), ((1, 3), 0), ((5, 1), 2), ((1, 1), 0), ((2, 3), 1)])
def test_the_gradient_of_a_single_group_is_a_convolution(monkeypatch, kernel, padding):
    layer = posed((2, 16, 9, 7), [(*kernel, 24)], padding=[((padding, 1), (1, padding))], bias=False)
    plan, asked = KernelPlan("tiled", SMALL), []
    monkeypatch.setattr(gradients, "_hopper_plan", lambda problem, capability: asked.append(problem) or plan)
    dx = gradients.input_gradient(layer.problem, last(layer.grad), layer.weights)
    assert len(asked) == 1
    assert_close(dx, layer.gradients[0])
    two = posed((1, 8, 5, 5), LOW_RANK)
    assert backward.turned(two.problem) is None  # groups add up: no single convolution
    assert backward.turned(replace(layer.problem, stride=(2, 2))) is None


HOPPER = [
    pytest.param((2, 24, 9, 7), [(3, 1, 16), (1, 3, 40)], 7, id="odd size, ragged groups"),
    pytest.param((3, 16, 8, 8), [(3, 1, 16), (1, 3, 16), (3, 3, 16)], 40, id="three groups"),
    pytest.param((1, 32, 11, 6), [(5, 1, 16), (1, 5, 16)], 9, id="five taps"),
    pytest.param((2, 40, 7, 5), [(1, 1, 32)], 50, id="pointwise"),
    pytest.param((2, 16, 7, 6), [(2, 1, 16), (1, 2, 24)], 9, id="two taps"),
    pytest.param((1, 16, 5, 9), [(3, 3, 16), (1, 1, 24)], 1, id="lengthened, one share"),
    pytest.param((2, 16, 6, 6), [(1, 5, 16), (3, 3, 16), (1, 1, 16)], 9, id="lengthened to five"),
]


@pytest.mark.parametrize(("size", "groups", "programs"), HOPPER)
def test_the_weights_gradient_of_hopper_and_its_ring_of_buffers(hopper, size, groups, programs):
    layer = posed(size, groups, bias=False)
    longer = equivalent.lengthened(layer.problem, hopper_plan.RUNS) or layer.problem
    assert hopper_plan.weights_unsupported(replace(longer, dtype=torch.bfloat16)) is None
    tile, g, pixels = Tile(pixels=32, filters=16, depth=16, stages=3), last(layer.grad), last(layer.x)
    launch = hopper.hopper_weights.launch_weights_hopper
    ours = launch(longer, g, pixels, programs, tile)
    found = equivalent.own_taps(ours, layer.problem, longer.groups)
    for part, right in zip(found, layer.gradients[1:], strict=True):
        assert_close(part, right)
    # Every second pixel of larger maps, and some of the filters of a larger gradient.
    wide = torch.randn(size[0], 2 * size[2], 2 * size[3], size[1])
    wide[:, 1::2, ::2] = pixels
    more = torch.cat([torch.randn(*g.shape[:3], 8), g], -1)
    again = launch(longer, more[..., 8:], wide[:, 1::2, ::2], programs, tile)
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("size", "groups", "options"),
    [
        pytest.param((2, 3, 12, 34), LOW_RANK, {}, id="low-rank"),
        pytest.param((1, 3, 17, 21), [(3, 3, 80)], {}, id="dense, odd size, two tiles of filters"),
        pytest.param((3, 1, 4, 4), [(1, 3, 16)], {}, id="one channel"),
        pytest.param((1, 3, 8, 8), [(3, 3, 16)], {"padding": [((1, 3), (1, 3))]}, id="results beyond the image"),
    ],
)
def test_the_gradient_over_windows(hopper, size, groups, options, stages):
    layer = posed(size, groups, relu=True, pool="floor", **options)
    arguments = (last(layer.x), last(layer.grad), seen_by(layer), WindowTile(stages, residents=1))
    dw, db = hopper.window.launch_window_gradient(layer.problem, *arguments)
    assert db.is_contiguous()  # as the operator promises
    for ours, right in zip([db, *dw], layer.gradients[1:], strict=True):
        assert_close(ours, right)


def test_which_gpu_takes_which_gradient(monkeypatch):
    taken, found = [], ([], torch.zeros(1))
    longer = [torch.randn(16, 16, 3, 3), torch.randn(16, 16, 3, 1)]
    monkeypatch.setattr(hopper_weights, "launch_weights_hopper", lambda *_: taken.append("hopper") or longer)
    monkeypatch.setattr(backward, "launch_weight_gradient", lambda *rest: taken.append(rest[-1].stages))
    monkeypatch.setattr(window, "launch_window_gradient", lambda *_: taken.append("window") or found)
    monkeypatch.setattr(stem, "launch_stem_gradient", lambda *_: taken.append("stem") or found)

    def ask(capability, channels, groups, dtype, **options):
        monkeypatch.setattr(gpu, "capability_of", lambda _: capability)
        shapes, padding = [(f, channels, h, w) for h, w, f in groups], [same(h, w) for h, w, _ in groups]
        problem = pose((1, channels, 4, 4), shapes, dtype, stride=(1, 1), padding=padding, **options)
        if channels > 4:
            return gradients.weight_gradient(problem, torch.zeros(1), torch.zeros(1))
        x, grad, seen = torch.zeros(1, channels, 4, 4), torch.zeros(1, 16, 2, 2), torch.zeros(1, 2, 2, 16)
        return gradients.compute_gradients(problem, grad, x, [], seen, need_input=False)

    half, first = [(3, 3, 16), (1, 1, 16)], {"relu": True, "pool": "floor"}
    own = ask((9, 0), 16, half, torch.bfloat16)
    assert torch.equal(own[1], longer[1][:, :, 1:2])  # the taps of the group itself
    ask((9, 0), 16, [(3, 1, 8), (1, 3, 8)], torch.float32)
    ask((10, 0), 16, half, torch.bfloat16)
    ask((8, 0), 16, half, torch.bfloat16)
    for capability, channels in [((9, 0), 3), ((9, 0), 4), ((8, 0), 3)]:
        ask(capability, channels, [(3, 3, 16)], torch.bfloat16, **first)
    assert taken == ["hopper", 1, 1, 3, "window", "stem", "stem"]
