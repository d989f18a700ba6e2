"""The choice between the fused kernels and torch, and the operators behind it."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels import (
    composite_conv2d,
    composite_conv2d_with_statistics,
    composite_reference,
    describe,
    explain,
    forced,
)
from lowrank_cnn.kernels.autotune import choice
from lowrank_cnn.method.count import count
from lowrank_cnn.method.layers import CompositeConv2d
from tests.kernels.helpers import DEVICE, GPU, PADDING, inputs, numbers


@pytest.mark.parametrize("pool", [None, "floor", "ceil"])
def test_switched_off_it_is_the_reference(pool):
    x, weights, bias = inputs((1, 3, 7, 7), filters=5)
    with forced("off"):
        y = composite_conv2d(x, weights, bias, padding=PADDING, relu=True, pool=pool)
    assert torch.equal(
        y, composite_reference(x, weights, bias, stride=(1, 1), padding=PADDING, relu=True, pool=pool)
    )


class ConvCounter(TorchFunctionMode):
    """Counts the convs that torch runs."""

    convs = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.convs += func in (torch.conv2d, torch.nn.functional.conv2d)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("padding", ["same", "valid", 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    "groups",
    [
        [(3, 1, 4), (1, 3, 2)],
        [(3, 3, 2), (1, 1, 3)],
        [(5, 1, 2), (1, 5, 2), (1, 1, 1)],
        [(2, 3, 2), (3, 2, 2)],
    ],
)
def test_as_one_dense_conv_results_and_gradients_are_the_same(groups, stride, padding):
    layer = CompositeConv2d(3, groups, stride=stride, padding=padding).double()
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True)
    found = {}
    for how in ("off", "dense"):
        with forced(how), ConvCounter() as counter:
            y = layer(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        found[how] = [y, *gradients]
        assert counter.convs == (1 if how == "dense" else len(groups))
    assert all(torch.allclose(a, b) for a, b in zip(found["dense"], found["off"], strict=True))


def test_torch_compile_traces_one_dense_conv_where_it_is_asked_for():
    convs = []

    def counted(module, _):
        convs.append(sum("conv2d" in str(node.target) for node in module.graph.nodes))
        return module.forward

    layer, x = CompositeConv2d(3, [(3, 1, 4), (1, 3, 4)]), torch.randn(1, 3, 8, 8)
    for how in ("off", "dense"):
        torch._dynamo.reset()
        with forced(how):
            assert torch.allclose(torch.compile(layer, backend=counted, fullgraph=True)(x), layer(x), atol=1e-6)
    assert convs == [2, 1]


def test_counts_and_exports_are_of_the_layer_itself():
    layer = CompositeConv2d(3, [(3, 1, 4), (1, 3, 4)])
    macs = count(layer, (3, 8, 8)).macs
    with forced("dense"):
        assert count(layer, (3, 8, 8)).macs == macs == 8 * 8 * 3 * 3 * 8
        exported = torch.export.export(layer, (torch.randn(1, 3, 8, 8),))
    assert sum("conv2d" in str(node.target) for node in exported.graph.nodes) == 2


def test_it_says_why():
    x, weights, _ = inputs()
    problem = describe(x, weights, stride=(1, 1), padding=PADDING)
    with forced("off"):
        assert "torch (switched off)" in explain(problem, DEVICE)
    with forced("dense"):
        assert "torch (mode dense: in training as one dense conv)" in explain(problem, DEVICE, training=True)
        assert "torch (mode dense: in training as one dense conv)" in explain(problem, DEVICE)
    with forced("on"):
        assert "fused" in explain(problem, DEVICE)
        odd = describe(x.double(), weights, stride=(1, 1), padding=PADDING)
        assert "float64" in explain(odd, DEVICE)


ACTIVATIONS = ["relu", "leaky_relu:0.2", "silu", "gelu", "hardswish", None]


@pytest.mark.parametrize("how", ["on", "off"])
@pytest.mark.parametrize("pool", [None, "floor", "3x3/2"])
@pytest.mark.parametrize(
    ("activation", "add_last"), [*((name, False) for name in ACTIVATIONS), ("relu", True), ("silu", True)]
)
def test_residual_activation_and_pool_follow_in_order(activation, add_last, pool, how):
    """Whatever of it a kernel takes; without gradients, then with them."""
    pytest.importorskip("triton")
    x, weights, bias = inputs((1, 8, 6, 6))
    added = numbers((1, 16, 6, 6)).contiguous(memory_format=torch.channels_last)
    options = {"padding": PADDING, "activation": activation, "pool": pool, "add_last": add_last}
    exact = [x.double(), [w.double() for w in weights], bias.double()]
    right = composite_reference(*exact, stride=(1, 1), residual=added.double(), **options)
    with forced(how), torch.no_grad():
        y = composite_conv2d(x, weights, bias, residual=added, **options)
    assert torch.linalg.vector_norm(y - right) <= (3e-3 if GPU else 1e-5) * torch.linalg.vector_norm(right)
    leaves = [*weights, bias, x, added]
    for leaf in leaves:
        leaf.requires_grad_()
    exact = [x.double(), [w.double() for w in weights], bias.double()]
    right = composite_reference(*exact, stride=(1, 1), residual=added.double(), **options)
    grad = torch.randn_like(right)
    with forced(how):
        y = composite_conv2d(x, weights, bias, residual=added, **options)
    for ours, other in zip(
        torch.autograd.grad(y, leaves, grad.to(y.dtype)), torch.autograd.grad(right, leaves, grad), strict=True
    ):
        assert torch.linalg.vector_norm(ours - other) <= (1e-2 if GPU else 1e-5) * torch.linalg.vector_norm(other)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"activation": "tanh"}, "activation is one of relu"),
        ({"activation": "relu:2"}, "activation is one of relu"),
        ({"activation": "leaky_relu:much"}, "activation is one of relu"),
        ({"relu": True, "activation": "silu"}, "contradict"),
    ],
)
def test_an_unknown_activation_is_refused(options, why):
    x, weights, bias = inputs()
    with pytest.raises(LowRankError, match=why):
        composite_conv2d(x, weights, bias, padding=PADDING, **options)


def test_a_residual_of_another_type_decides_the_type_of_the_sum():
    pytest.importorskip("triton")
    x, weights, bias = inputs(dtype=torch.float16)
    added = torch.randn(2, 16, 6, 6, device=DEVICE)
    with forced("on"), torch.no_grad():
        y = composite_conv2d(x, weights, bias, padding=PADDING, residual=added)
    assert y.dtype == torch.float32


def test_a_layer_without_a_gpu_says_that_it_trains_as_one_dense_conv():
    layer, x = CompositeConv2d(8, [(3, 1, 8), (1, 3, 8)]), torch.randn(1, 8, 6, 6)
    with forced("dense"):
        assert layer.explain(x).endswith("torch (mode dense: in training as one dense conv)")


def test_a_layer_takes_the_fused_path_when_told_and_says_so():
    pytest.importorskip("triton")
    layer, x = CompositeConv2d(8, [(3, 1, 8), (1, 3, 8)]).to(DEVICE), inputs()[0]
    with forced("off"):
        exact = layer(x)
        assert "switched off" in layer.explain(x) if GPU else "not on a GPU" in layer.explain(x)
    with forced("on"):
        assert torch.allclose(layer(x), exact, atol=2e-2 if GPU else 1e-5)
        assert "fused" in layer.explain(x)
        assert "without its batch" in layer.explain(x[0])


@pytest.fixture
def as_dense(monkeypatch):
    """The choice for several groups is one dense conv, for which another choice is made."""
    asked, choose = [], choice.plan_text

    def plan_text(shapes, *rest):
        asked.append([shape[2:] for shape in shapes[1:]])
        return choice.DENSE if len(shapes) > 2 else choose(shapes, *rest)

    monkeypatch.setattr(choice, "plan_text", plan_text)
    return asked


@pytest.mark.parametrize("statistics", [False, True])
def test_a_layer_trains_as_one_dense_conv_by_the_kernels(as_dense, statistics):
    pytest.importorskip("triton")
    x, weights, bias = inputs()
    leaves = [leaf.requires_grad_() for leaf in (*weights, bias, x)]
    exact = [x.double(), [w.double() for w in weights], bias.double()]
    right = composite_reference(*exact, stride=(1, 1), padding=PADDING)
    with forced("on"):
        if statistics:
            y, mean, _ = composite_conv2d_with_statistics(x, weights, bias, padding=PADDING)
            assert torch.allclose(mean.double(), right.mean((0, 2, 3)), atol=1e-2 if GPU else 1e-5)
        else:
            y = composite_conv2d(x, weights, bias, padding=PADDING)
    assert as_dense == [[(3, 1), (1, 3)], [(3, 3)]]
    grad = torch.randn_like(right)
    found = [y, *torch.autograd.grad(y, leaves, grad.to(y.dtype))]
    for ours, other in zip(found, [right, *torch.autograd.grad(right, leaves, grad)], strict=True):
        assert torch.linalg.vector_norm(ours - other) <= (1e-2 if GPU else 1e-5) * torch.linalg.vector_norm(other)


def test_torch_compile_takes_the_dense_conv_whole(as_dense):
    pytest.importorskip("triton")
    torch._dynamo.reset()
    layer, x = CompositeConv2d(8, [(3, 1, 8), (1, 3, 8)]).to(DEVICE), inputs()[0]
    with forced("on"):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        ours, right = (torch.autograd.grad(f(x).square().sum(), layer.weights[1])[0] for f in (compiled, layer))
    assert [(3, 3)] in as_dense
    assert torch.linalg.vector_norm(ours - right) <= 3e-3 * torch.linalg.vector_norm(right)


@pytest.mark.parametrize("how", ["on", "off"])
def test_torch_compile_takes_it_whole_at_every_batch(how):
    pytest.importorskip("triton")
    torch._dynamo.reset()
    layer = CompositeConv2d(8, [(3, 1, 8), (1, 3, 8)]).to(DEVICE)
    with forced(how):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for batch in (1, 2, 3):
            x = inputs((batch, 8, 6, 6))[0]
            ours, right = (
                torch.autograd.grad(f(x).square().sum(), layer.weights[1])[0] for f in (compiled, layer)
            )
            assert torch.linalg.vector_norm(ours - right) <= 3e-3 * torch.linalg.vector_norm(right)


def test_gradients_under_autocast_keep_the_weights_precision():
    pytest.importorskip("triton")
    x, weights, bias = inputs()
    weights = [weight.requires_grad_() for weight in weights]
    with forced("on"), torch.autocast(DEVICE.type, dtype=torch.float16):
        y = composite_conv2d(x, weights, bias, padding=PADDING, relu=True)
    assert y.dtype == torch.float16
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(y.float().sum(), weights))


def test_weights_that_change_are_packed_again():
    pytest.importorskip("triton")
    x, weights, bias = inputs()
    with forced("on"), torch.no_grad():
        composite_conv2d(x, weights, bias, padding=PADDING)
        # As a replayed graph does it: the numbers change and the tensor's version does not.
        with torch.autograd._unsafe_preserve_version_counter(weights[1]):
            weights[1].mul_(2)
        y = composite_conv2d(x, weights, bias, padding=PADDING)
    right = composite_reference(x, weights, bias, stride=(1, 1), padding=PADDING)
    assert torch.allclose(y, right, atol=1e-1 if GPU else 1e-4)


@pytest.mark.parametrize("channels", [3, 8])
def test_an_in_place_relu_may_follow_a_layer_that_trains(channels):
    pytest.importorskip("triton")
    layer, x = CompositeConv2d(channels, [(3, 1, 8), (1, 3, 8)]).to(DEVICE), inputs((1, channels, 6, 6))[0]
    gradients = []
    for how in ("on", "off"):
        with forced(how):
            y = torch.relu_(layer(x))
        gradients.append(torch.autograd.grad(y.square().sum(), list(layer.parameters())))
    for ours, right in zip(*gradients, strict=True):
        assert torch.linalg.vector_norm(ours - right) <= (1e-2 if GPU else 1e-5) * torch.linalg.vector_norm(right)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize(
    ("size", "pool"), [((64, 64, 56, 56), "ceil"), ((256, 256, 28, 28), None), ((8, 3, 224, 224), "floor")]
)
def test_a_training_step_in_a_cuda_graph_at_full_size(size, pool):
    from lowrank_cnn.kernels.cuda_graph import captured

    x, weights, bias = inputs(size, filters=64, dtype=torch.bfloat16)
    leaves = [weight.requires_grad_() for weight in weights] + ([x.requires_grad_()] if size[1] > 4 else [])
    found = []

    def step():
        with forced("on"):
            y = composite_conv2d(x, weights, bias, padding=PADDING, relu=True, pool=pool)
        found[:] = [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    graph = captured(step)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    options = {"stride": (1, 1), "padding": PADDING, "relu": True, "pool": pool}
    y = composite_reference(x.float(), [w.float() for w in weights], bias, **options)
    exact = [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]
    for ours, right in zip(found, exact, strict=True):
        assert torch.linalg.vector_norm(ours - right) <= 2e-2 * torch.linalg.vector_norm(right)
