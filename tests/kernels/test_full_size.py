"""Every plan of a GPU at the sizes it is made for, forward and gradients, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.conv import forward, gradients
from lowrank_cnn.kernels.conv.backward import launch_weight_gradient
from lowrank_cnn.kernels.conv.plans import KERNELS, KernelPlan
from lowrank_cnn.kernels.conv.plans import plans as plans_of
from lowrank_cnn.kernels.problem import ConvTensors, Problem, describe, empty_codes, pixels_last
from lowrank_cnn.kernels.reference import composite_reference
from tests.kernels.helpers import channels_last, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROUNDED = 5e-3
"""What rounding one result to bfloat16 may cost, relative to the norm."""
SUMMED = 1e-4

CASES = [
    pytest.param((32, 64, 56, 56), [(3, 1, 64), (1, 3, 64)], id="low-rank"),
    pytest.param((16, 128, 27, 29), [(3, 1, 64), (1, 3, 64), (3, 3, 128)], id="mixture of odd size"),
    pytest.param((16, 256, 14, 14), [(3, 3, 256)], id="dense"),
    pytest.param((16, 128, 28, 28), [(1, 1, 192)], id="join"),
    pytest.param((16, 192, 30, 30), [(5, 1, 96), (1, 5, 96)], id="five taps"),
    pytest.param((1, 40, 45, 33), [(3, 1, 24), (1, 3, 56)], id="one image, ragged groups"),
    pytest.param((64, 96, 8, 8), [(1, 3, 192)], id="half of a separable pair"),
    pytest.param((32, 96, 16, 16), [(5, 1, 116), (1, 5, 116)], id="groups that begin within a box"),
    pytest.param((32, 128, 28, 28), [(3, 3, 64), (1, 1, 64)], id="half"),
    pytest.param((16, 64, 27, 29), [(3, 1, 16), (1, 3, 32), (1, 1, 16), (3, 3, 32)], id="quarters"),
    pytest.param((16, 64, 30, 30), [(1, 5, 64), (3, 3, 32)], id="three and five taps"),
    pytest.param((16, 64, 28, 28), [(3, 1, 24), (1, 3, 24), (3, 3, 16)], id="narrow, enclosed"),
]


EPILOGUES = [
    pytest.param((32, 64, 56, 56), [(3, 1, 32), (1, 3, 32)], (1, 1), "relu", id="low-rank"),
    pytest.param((32, 64, 56, 56), [(3, 1, 64), (1, 3, 64)], (2, 2), "relu", id="low-rank, stride 2"),
    pytest.param((32, 128, 28, 28), [(3, 3, 256)], (2, 2), "silu", id="dense, stride 2"),
    pytest.param((32, 64, 56, 56), [(1, 1, 128)], (2, 2), None, id="pointwise, stride 2"),
    pytest.param((32, 256, 28, 28), [(1, 1, 512)], (1, 1), "gelu", id="pointwise"),
    pytest.param((16, 512, 7, 7), [(3, 1, 256), (1, 3, 256)], (1, 1), "leaky_relu:0.1", id="small maps"),
    pytest.param((8, 48, 31, 29), [(3, 1, 24), (1, 3, 40)], (1, 1), "hardswish", id="ragged"),
    pytest.param((32, 64, 28, 28), [(3, 1, 32), (3, 3, 32)], (2, 2), "relu", id="enclosed, stride 2"),
    pytest.param((8, 40, 15, 13), [(3, 3, 64)], (2, 2), "relu", id="odd size, stride 2"),
    pytest.param((8, 3, 64, 64), [(7, 1, 32), (1, 7, 32)], (2, 2), "silu", id="first"),
]
STEMS = [
    pytest.param((16, 3, 224, 224), [(7, 1, 32), (1, 7, 32)], (2, 2), id="low-rank stem"),
    pytest.param((16, 3, 224, 224), [(7, 7, 64)], (2, 2), id="dense stem"),
    pytest.param((3, 3, 101, 97), [(7, 1, 24), (1, 7, 40)], (2, 2), id="stem of odd size"),
    pytest.param((3, 4, 66, 130), [(3, 3, 48)], (1, 2), id="rows of stride 1"),
]


def posed(size, groups, *, residual=False, dtype=torch.bfloat16, **options):
    """A layer, its exact tensors (input, weights, bias) in float64, and its exact result."""
    x = channels_last(torch.randn(size, device="cuda", dtype=dtype))
    taps = max(h * w for h, w, _ in groups)
    weights = [torch.randn(f, size[1], h, w, device="cuda").div((size[1] * taps) ** 0.5) for h, w, f in groups]
    weights = [weight.to(dtype) for weight in weights]
    bias = torch.randn(sum(f for *_, f in groups), device="cuda")
    options = {"stride": (1, 1), "padding": [same(h, w) for h, w, _ in groups], **options}
    problem = describe(x, weights, residual=residual, **options)
    added = None
    if residual:
        maps = torch.randn(size[0], problem.filters, *problem.result_size, device="cuda", dtype=dtype)
        added = channels_last(maps)
    exact = [x.double().requires_grad_(), *(w.double().requires_grad_() for w in weights), bias.double()]
    y = composite_reference(
        exact[0], exact[1:-1], exact[-1], **options, residual=None if added is None else added.double()
    )
    return problem, x, weights, bias, added, exact, y.detach()


def linear(problem, exact):
    """The conv alone, in float64."""
    return composite_reference(exact[0], exact[1:-1], None, stride=problem.stride, padding=problem.padding)


def plans(problem: Problem) -> list[KernelPlan]:
    return plans_of(problem, capability=torch.cuda.get_device_capability())


def off(ours, right) -> float:
    return float(torch.linalg.vector_norm(ours - right) / torch.linalg.vector_norm(right))


def worst(ours, right) -> float:
    """A few wrong pixels among millions, which a norm does not show."""
    return float((ours - right).abs().max() / right.abs().max())


def flat(parts) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])


def assert_every_plan_is_right(size, groups, **options):
    problem, x, weights, bias, added, _, y = posed(size, groups, **options)
    assert plans(problem)
    for plan in plans(problem):
        for _ in range(3):  # a race shows as a moving error
            found = forward.run_plan(plan, problem, x, weights, bias, residual=added)
            assert off(found, y) < ROUNDED, str(plan)
            assert worst(found, y) < ROUNDED, str(plan)


@pytest.mark.parametrize("pool", [None, "floor", "ceil"])
@pytest.mark.parametrize(("size", "groups"), CASES)
def test_every_plan_gives_the_result(size, groups, pool):
    assert_every_plan_is_right(size, groups, relu=True, pool=pool)


@pytest.mark.parametrize(("residual", "add_last"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("size", "groups", "stride", "activation"), EPILOGUES)
def test_every_plan_gives_stride_residual_and_activation(size, groups, stride, activation, residual, add_last):
    epilogue = {"activation": activation, "residual": residual, "add_last": add_last}
    assert_every_plan_is_right(size, groups, stride=stride, **epilogue)


@pytest.mark.parametrize("pool", [None, "3x3/2"])
@pytest.mark.parametrize(("size", "groups", "stride"), STEMS)
def test_every_plan_of_a_stem(size, groups, stride, pool):
    assert_every_plan_is_right(size, groups, stride=stride, relu=True, pool=pool)


@pytest.mark.parametrize(("size", "groups", "stride"), [case.values[:3] for case in EPILOGUES])
def test_every_plan_gives_the_statistics(size, groups, stride):
    """Of the result as it was rounded, and the same ones every time."""
    problem, x, weights, _, _, _, _ = posed(size, groups, stride=stride)
    for plan in plans(problem):
        given = ConvTensors(x, KERNELS[plan.kernel].layout.pack(weights, problem, x.dtype))
        y, (mean, variance) = forward.run_with_statistics(plan, problem, given)
        exact = torch.var_mean(y.double(), (0, 2, 3), correction=0)
        assert off(variance, exact[0]) < SUMMED, str(plan)
        assert float((mean - exact[1]).abs().max()) < SUMMED * float(exact[0].max()) ** 0.5, str(plan)
        again = forward.run_with_statistics(plan, problem, given)[1]
        assert torch.equal(again, torch.stack([mean, variance])), str(plan)


FIRST = [
    pytest.param((16, 3, 224, 224), [(3, 1, 32), (1, 3, 32)], id="first low-rank"),
    pytest.param((16, 3, 224, 224), [(3, 3, 64)], id="first dense"),
    pytest.param((8, 3, 45, 38), [(3, 1, 64), (1, 3, 64)], id="first wide, odd size"),
    pytest.param((64, 1, 28, 28), [(3, 3, 16)], id="first grey"),
]


@pytest.mark.parametrize(("size", "groups"), FIRST)
def test_every_plan_of_a_first_layer_names_the_winners_and_trains(size, groups):
    problem, x, weights, bias, _, exact, y = posed(size, groups, relu=True, pool="floor")
    conv = linear(problem, exact)
    quads = conv[:, :, : 2 * y.shape[2], : 2 * y.shape[3]].unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    grad = torch.randn_like(y).to(x.dtype)
    for plan in plans(problem):
        codes = empty_codes(problem, x)
        found = forward.run_plan(plan, problem, x, weights, bias, codes)
        assert worst(found, y) < ROUNDED, str(plan)
        code = codes.permute(0, 3, 1, 2).long()
        won = quads.gather(-1, code.clamp(max=3).unsqueeze(-1)).squeeze(-1)
        pooled = won.detach() + exact[-1][:, None, None]
        assert worst(torch.where(code == 4, 0, pooled), y) < 1e-5, str(plan)
    cut = grad.double() * (code < 4)
    right = torch.autograd.grad(won, exact[1:-1], cut)
    dx, dw, db = gradients.compute_gradients(problem, grad, x, weights, codes, need_input=False)
    assert dx is None
    assert off(flat(dw), flat(right)) < SUMMED
    assert off(db, cut.sum((0, 2, 3))) < SUMMED


def test_a_compiled_first_layer_trains_alike():
    """The compiler believes what the operators promise of their results' memory."""
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)).cuda()
    layer = fuse(chain.to(memory_format=torch.channels_last))
    x = torch.randn(8, 3, 64, 64, device="cuda").contiguous(memory_format=torch.channels_last)
    found = []
    for run in (layer, torch.compile(layer)):
        with forced("on"), torch.autocast("cuda", dtype=torch.bfloat16):
            y = run(x)
        found.append(torch.autograd.grad(y.float().square().sum(), list(chain.parameters())))
    for eager, compiled in zip(*found, strict=True):
        assert off(compiled, eager) < ROUNDED


@pytest.mark.parametrize(("size", "groups"), CASES)
def test_the_gradients(size, groups):
    problem, x, weights, bias, _, exact, y = posed(size, groups, relu=True)
    grad = torch.randn_like(y).to(x.dtype)
    seen = forward.run_plan(plans(problem)[0], problem, x, weights, bias)
    cut = grad.double() * (seen > 0)  # results next to zero may be rounded to either side
    right = torch.autograd.grad(linear(problem, exact), exact[:-1], cut)
    dx, dw, db = gradients.compute_gradients(problem, grad, x, weights, seen.permute(0, 2, 3, 1), need_input=True)
    assert worst(dx, right[0]) < ROUNDED
    assert off(flat(dw), flat(right[1:])) < SUMMED
    assert off(db, cut.sum((0, 2, 3))) < SUMMED
    # The plain kernel of other devices, many times over: where it went wrong, it did so now and then.
    g, tile = pixels_last(cut.to(x.dtype)), gradients._weight_tile(problem, torch.cuda.get_device_capability())
    for _ in range(10):
        found = launch_weight_gradient(problem, g, pixels_last(x), 264, tile)
        assert off(flat(found), flat(right[1:])) < SUMMED
