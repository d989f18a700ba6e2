"""Groups of different lengths as groups of one length: which length, and results that do not change."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.autotune import choice
from lowrank_cnn.kernels.conv import forward, hopper_plan
from lowrank_cnn.kernels.conv import forward as result_statistics
from lowrank_cnn.kernels.conv import hopper_plan as hopper_weights_plan
from lowrank_cnn.kernels.conv.equivalent import is_worth_enclosing, lengthened, own_taps
from lowrank_cnn.kernels.conv.hopper_plan import HopperTile, WeightTile
from lowrank_cnn.kernels.conv.pack import pack_rows, unpack_rows
from lowrank_cnn.kernels.conv.plans import KernelPlan, plans
from lowrank_cnn.kernels.fused_convs import FrozenComposite
from lowrank_cnn.kernels.problem import describe, pose
from lowrank_cnn.kernels.reference import composite_reference, enclosed
from tests.kernels.helpers import same


def problem(groups, **options):
    shapes, padding = [(f, 64, h, w) for h, w, f in groups], [same(h, w) for h, w, _ in groups]
    options = {"stride": (1, 1), "padding": padding, **options}
    return pose((32, 64, 56, 56), shapes, torch.bfloat16, **options)


@pytest.mark.parametrize(
    ("groups", "longer"),
    [
        ([(3, 3, 32), (1, 1, 32)], [(3, 3), (3, 1)]),
        ([(3, 1, 16), (1, 3, 16), (1, 1, 16), (3, 3, 16)], [(3, 1), (1, 3), (3, 1), (3, 3)]),
        ([(5, 1, 16), (1, 5, 16), (1, 1, 16)], [(5, 1), (1, 5), (5, 1)]),
        ([(1, 5, 16), (3, 3, 48)], [(3, 5), (3, 3)]),  # ten taps more for few filters, not six for many
        ([(1, 5, 48), (3, 3, 16)], [(1, 5), (5, 3)]),
        ([(3, 1, 16), (1, 5, 16)], [(5, 1), (1, 5)]),
        ([(2, 2, 16)], [(3, 2)]),
        ([(4, 1, 16), (1, 4, 16)], [(5, 1), (1, 5)]),
    ],
)
def test_the_length_that_adds_the_fewest_products(groups, longer):
    found = lengthened(problem(groups))
    assert found is not None
    assert [(group.height, group.width) for group in found.groups] == longer
    assert hopper_plan.unsupported(found) is None
    assert (found.out_height, found.out_width) == (56, 56)


@pytest.mark.parametrize(
    ("groups", "options"),
    [
        ([(3, 1, 16), (1, 3, 16), (3, 3, 16)], {}),  # one length already
        ([(1, 1, 16), (1, 1, 16)], {}),
        ([(3, 3, 16), (1, 1, 16)], {"stride": (2, 2)}),  # each tap is a run of its own
        ([(7, 7, 16), (1, 1, 16)], {}),
        ([(3, 1, 16), (1, 1, 64)], {}),  # more than twice the products
    ],
)
def test_others_are_left_as_they_are(groups, options):
    assert lengthened(problem(groups, **options)) is None


@pytest.mark.parametrize(
    ("groups", "worth"),
    [
        ([(3, 1, 16), (1, 3, 16), (1, 1, 16), (3, 3, 16)], True),  # tiles of 16 filters
        ([(3, 1, 72), (1, 3, 72), (3, 3, 48)], True),
        ([(3, 1, 96), (1, 3, 96), (3, 3, 64)], False),
        ([(3, 3, 64), (1, 1, 64)], False),
        ([(3, 3, 100), (1, 1, 92)], True),  # no multiples of 8, which no other form takes
        ([(3, 1, 32), (1, 3, 32)], False),  # three times the products
        ([(3, 3, 32)], False),
    ],
)
def test_narrow_and_ragged_groups_are_worth_a_try_as_one_dense_group(groups, worth):
    assert is_worth_enclosing(problem(groups)) is worth
    found = {plan.kernel for plan in plans(problem(groups), capability=(9, 0))}
    assert ("enclosed" in found) is worth
    assert "enclosed" not in {plan.kernel for plan in plans(problem(groups), capability=(8, 0))}


def test_gradients_of_weights_have_runs_of_two_as_well():
    twos = problem([(2, 2, 16), (1, 1, 16)])
    found = lengthened(twos, hopper_weights_plan.RUNS)
    assert found is not None
    assert [(group.height, group.width) for group in found.groups] == [(2, 2), (2, 1)]
    assert lengthened(problem([(3, 1, 16), (1, 1, 16)]), hopper_weights_plan.RUNS) is None
    four = lengthened(problem([(4, 1, 16)]), hopper_weights_plan.RUNS)
    assert four is not None
    assert hopper_plan.run_length(four) == 5


CASES = [
    pytest.param((2, 16, 9, 7), [(3, 3, 16), (1, 1, 24)], None, None, id="half, odd size"),
    pytest.param((3, 16, 8, 8), [(3, 1, 16), (1, 3, 16), (1, 1, 16), (3, 3, 16)], None, "floor", id="quarters"),
    pytest.param((1, 24, 7, 6), [(1, 5, 16), (3, 3, 16)], None, "ceil", id="five beside three"),
    pytest.param(
        (1, 16, 6, 9), [(2, 2, 16), (1, 1, 16)], [((1, 0), (0, 1)), ((0, 0), (0, 0))], None, id="even, uneven"
    ),
    pytest.param(
        (1, 16, 8, 8), [(3, 3, 16), (1, 1, 16)], [((2, 2), (0, 1)), ((1, 1), (-1, 0))], None, id="cropped"
    ),
]
RAGGED = pytest.param((2, 16, 6, 7), [(3, 1, 12), (1, 3, 4), (3, 3, 16)], None, None, id="ragged")
FORMS = {"lengthened": CASES, "enclosed": [*CASES[:3], *CASES[4:], RAGGED]}  # 2x2 is no run, and has no dense form


def layer(size, groups, padding, **epilogue):
    torch.manual_seed(5)
    x, weights = torch.randn(size), [torch.randn(f, size[1], h, w) for h, w, f in groups]
    options = {"stride": (1, 1), "padding": padding or [same(h, w) for h, w, _ in groups], **epilogue}
    return x, weights, torch.randn(sum(f for *_, f in groups)), options


def plan_of(kernel, pixels=32):
    return KernelPlan(kernel, HopperTile(pixels, 16, depth=16, boxes=2, slabs=3, parts=1))


def assert_close(ours, right):
    assert ours.shape == right.shape
    assert torch.linalg.vector_norm(ours - right) < 1e-5 * torch.linalg.vector_norm(right)


@pytest.mark.parametrize(
    ("kernel", "size", "groups", "padding", "pool"),
    [(kernel, *case.values) for kernel, cases in FORMS.items() for case in cases],
)
def test_the_hopper_kernel_gives_the_same_results(monkeypatch, hopper_model, kernel, size, groups, padding, pool):
    x, weights, bias, options = layer(size, groups, padding, relu=True, pool=pool)
    hopper_model.poison(hopper_model.emulate(monkeypatch))
    for residual in (False, True)[: 1 if pool else 2]:  # no kernel pools behind a residual
        posed = describe(x, weights, residual=residual, **options)
        added = torch.randn(size[0], posed.filters, posed.out_height, posed.out_width) if residual else None
        y = forward.run_plan(plan_of(kernel), posed, x, weights, bias, residual=added)
        exact = None if added is None else added.double()
        numbers = (x.double(), [w.double() for w in weights], bias.double())
        assert_close(y, composite_reference(*numbers, **options, residual=exact))


@pytest.mark.parametrize("kernel", ["lengthened", "enclosed"])
def test_a_frozen_layer_keeps_its_packed_weights(monkeypatch, hopper_model, kernel):
    x, weights, bias, options = layer(*CASES[0].values[:3])
    hopper_model.poison(hopper_model.emulate(monkeypatch))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(choice, "plan_text", lambda *_: str(plan_of(kernel)))
    frozen = FrozenComposite(weights, bias, **options)
    right = composite_reference(x.double(), [w.double() for w in weights], bias.double(), **options)
    with forced("on"):
        found = [frozen(x) for _ in range(2)]
    assert f"packed_{kernel}_float32" in dict(frozen.named_buffers())
    assert torch.equal(*found)
    assert_close(found[0], right)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model of the hardware runs on the host")
@pytest.mark.parametrize("kernel", ["lengthened", "enclosed"])
@pytest.mark.parametrize(("size", "groups", "padding", "pool"), CASES[:1])
def test_the_hopper_kernel_leaves_statistics(monkeypatch, hopper_model, size, groups, padding, pool, kernel):
    x, weights, bias, options = layer(size, groups, padding)
    posed = describe(x, weights, **options)
    with monkeypatch.context() as patched:
        hopper_model.poison(hopper_model.emulate(patched))
        patched.setattr(result_statistics, "launch_merge", lambda parts: (parts, parts))
        y, parts, _ = forward.run_with_statistics(plan_of(kernel, 64), posed, x, weights, bias)
    mean, variance = result_statistics.launch_merge(parts)
    exact = composite_reference(x.double(), [w.double() for w in weights], bias.double(), **options)
    assert_close(y, exact)
    right = torch.var_mean(exact, (0, 2, 3), correction=0)
    assert parts[0].sum(0).eq(y.numel() // y.shape[1]).all()
    assert_close(torch.stack([variance, mean]), torch.stack(right))


@pytest.mark.parametrize(("size", "groups", "padding", "pool"), CASES)
def test_the_hopper_kernel_gives_the_gradients_of_the_groups_own_taps(
    monkeypatch, hopper_model, size, groups, padding, pool
):
    x, weights, _, options = layer(size, groups, padding)
    posed = describe(x, weights, **options)
    longer = lengthened(posed, hopper_weights_plan.RUNS)
    assert longer is not None
    leaves = [weight.double().requires_grad_() for weight in weights]
    y = composite_reference(x.double(), leaves, None, **options)
    grad = torch.randn(y.shape)
    kernel = hopper_model.emulate(monkeypatch, "hopper_weights")
    last = [t.permute(0, 2, 3, 1).contiguous() for t in (grad, x)]
    tile = WeightTile(pixels=32, filters=16, depth=16, stages=3)
    found = own_taps(kernel.launch_weights_hopper(longer, *last, 9, tile), posed, longer.groups)
    for ours, right in zip(found, torch.autograd.grad(y, leaves, grad.double()), strict=True):
        assert_close(ours, right)


def test_packed_weights_of_one_dense_group_are_those_of_the_enclosing_weight():
    groups, padding = [(3, 1, 8), (1, 3, 8), (2, 2, 8)], [((1, 1), (0, 0)), ((0, 0), (1, 1)), ((1, 0), (0, 1))]
    x, weights, _, options = layer((1, 16, 5, 5), groups, padding)
    posed = describe(x, weights, **options)
    packed = forward.pack_weights("enclosed", posed, weights, torch.float32)
    assert tuple(packed.shape) == forward.packed_shape("enclosed", posed)
    assert torch.equal(packed, pack_rows([enclosed(weights, padding)[0]], torch.float32))


def test_packed_weights_have_zeros_around_the_taps_and_the_expected_shape():
    x, weights, _, options = layer((1, 16, 5, 5), [(3, 3, 16), (1, 1, 16)], None)
    posed = describe(x, weights, **options)
    packed = forward.pack_weights("lengthened", posed, weights, torch.bfloat16)
    assert packed.dtype == torch.bfloat16
    assert tuple(packed.shape) == forward.packed_shape("lengthened", posed) == (12 * 16, 16)
    longer = lengthened(posed)
    assert longer is not None
    first, second = unpack_rows(packed, longer)
    assert torch.equal(first, weights[0].bfloat16())
    assert torch.equal(second[:, :, 1:2], weights[1].bfloat16())
    assert not second[:, :, ::2].any()
