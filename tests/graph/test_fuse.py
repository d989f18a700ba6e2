"""A fused copy computes what the network computes, forward and backward, on the same parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.graph.fused_between import FusedNorm, NormedConv
from lowrank_cnn.kernels import forced
from lowrank_cnn.method.schemes import build_conv
from lowrank_cnn.models import create_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def network(scheme):
    return nn.Sequential(
        build_conv(3, 8, 3, scheme), nn.ReLU(inplace=True), nn.MaxPool2d(2, ceil_mode=True),
        nn.Sequential(build_conv(8, 16, 3, scheme), nn.ReLU(), nn.MaxPool2d(3, 2)),
        nn.Conv2d(16, 8, 3, groups=2), nn.Flatten(), nn.LazyLinear(4),
    )  # fmt: skip


@pytest.mark.parametrize("scheme", ["dense", "lr", "lr-join", "separable"])
def test_the_copy_computes_the_same(scheme):
    model, x = network(scheme).double(), torch.randn(2, 3, 15, 14, dtype=torch.float64)
    exact = model(x)
    twin = fuse(model)
    assert torch.allclose(twin(x), exact)
    grads = torch.autograd.grad(exact.square().sum(), list(model.parameters()))
    twin(x).square().sum().backward()
    assert all(torch.allclose(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


def normed(dtype=torch.float32):
    """A network with batch norms, one of them without a ReLU, and a pool that no conv takes."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.Dropout(0.5),
        nn.Sequential(nn.BatchNorm2d(16, affine=False), nn.ReLU()), nn.Flatten(), nn.Linear(16 * 16, 4),
    )  # fmt: skip
    return model.to(DEVICE, dtype)


def test_norms_and_pools_are_fused():
    twin = fuse(normed().train())
    norms = [layer for layer in twin.modules() if isinstance(layer, FusedNorm)]
    assert [(norm.activation, norm.pool is not None) for norm in norms] == [
        ("relu", True),
        (None, False),
        ("relu", False),
    ]
    assert sum(isinstance(layer, NormedConv) for layer in twin.modules()) == 2
    assert not any(isinstance(layer, nn.BatchNorm2d | nn.ReLU | nn.MaxPool2d) for layer in twin.modules())


@pytest.mark.parametrize(
    "layer", [nn.SyncBatchNorm(4), nn.BatchNorm3d(4), nn.MaxPool2d(2, return_indices=True), nn.CrossMapLRN2d(5)]
)
def test_others_stay_as_they_are(layer):
    assert type(fuse(nn.Sequential(layer, nn.ReLU())).get_submodule("0")) is type(layer)


def test_the_copy_shares_parameters_and_statistics():
    model = normed().train()
    twin = fuse(model)
    assert {id(b) for b in twin.buffers()} == {id(b) for b in model.buffers()}
    model.double()
    x = torch.randn(2, 3, 8, 8, device=DEVICE, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    twin(x)
    assert model[1].num_batches_tracked == before["1.num_batches_tracked"] + 1
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert torch.equal(twin.eval()(x), model.eval()(x))
    assert not any(part.training for part in twin.modules())


@pytest.mark.parametrize("training", [True, False])
def test_traced_it_is_torch_alone(training):
    torch._dynamo.reset()
    model, x = normed().train(training), torch.randn(2, 3, 8, 8, device=DEVICE)
    model[6].p = 0.0
    twin, right = fuse(model), copy.deepcopy(model)
    with forced("on"):
        program = torch.export.export(twin, (x,))
        assert not any("lowrank" in str(node.target) for node in program.graph.nodes)
        y = torch.compile(twin, backend="aot_eager")(x)
    assert torch.allclose(y, right(x), atol=1e-4 if DEVICE == "cpu" else 1e-2)
    assert torch.allclose(model[1].running_mean, right[1].running_mean, atol=1e-3)
    assert model[1].num_batches_tracked == right[1].num_batches_tracked


def loss_and_gradients(network, model, x):
    loss = F.cross_entropy(network(x), torch.arange(len(x), device=x.device))
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.nightly
def test_a_whole_network_trains_alike():
    pytest.importorskip("triton")
    torch.manual_seed(0)
    model = create_model("nin-c3-lr", width=0.1, norm="batch", dropout=0.0).to(DEVICE)
    right, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    x = torch.randn(4, 3, 12, 11, device=DEVICE).contiguous(memory_format=torch.channels_last)
    twin = fuse(model)
    with forced("on"):
        found = loss_and_gradients(twin, model, x)
    exact = loss_and_gradients(right, right, x.double())
    with forced("off"):
        by_torch = loss_and_gradients(plain, plain, x)
    limit = 2e-4 if DEVICE == "cpu" else 5e-2
    for a, b, other in zip(found, exact, by_torch, strict=True):
        # Few pixels magnify rounding; torch's own, TF32 on a GPU, is the measure of what is to be expected.
        expected = torch.linalg.vector_norm(other - b)
        assert torch.linalg.vector_norm(a - b) <= 3 * expected + 1e-4 * torch.linalg.vector_norm(b) + 1e-9
    for (name, a), b in zip(model.named_buffers(), right.buffers(), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=limit, atol=limit), name
    twin.eval(), right.eval()
    with forced("on"), torch.no_grad():
        assert torch.allclose(twin(x).double(), right(x.double()), atol=10 * limit)


def test_a_step_that_comes_twice_runs_twice():
    relu = nn.ReLU()
    inner = nn.Sequential(nn.Conv2d(8, 8, 3), relu)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), relu, inner, nn.BatchNorm2d(8), inner), torch.randn(2, 3, 9, 9)
    assert torch.allclose(fuse(model.eval())(x), model(x), atol=1e-6)


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_are_computed_learn(norm):
    model = nn.Sequential(norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), norm(build_conv(4, 4, 3, "dense")), nn.ReLU())
    twin = fuse(model)
    assert {id(p) for p in twin.parameters()} == {id(p) for p in model.parameters()}
    twin(torch.randn(2, 3, 9, 9)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("at", range(7))
def test_hooks_are_called(at):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), build_conv(4, 4, 3, "lr"),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), nn.LocalResponseNorm(3),
    )  # fmt: skip
    calls = []
    model[at].register_forward_hook(lambda *_: calls.append(at))
    fuse(model)(torch.randn(2, 3, 9, 9))
    assert calls == [at]


class Leaks(nn.ReLU):
    def forward(self, x):
        return F.leaky_relu(x)


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(3)])
def test_a_relu_with_a_forward_of_its_own_stays(layer):
    model, x = nn.Sequential(layer, Leaks()), torch.randn(2, 3, 4, 4)
    assert torch.allclose(fuse(model.eval())(x), model(x))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.ReLU(), "relu"),
        (nn.LeakyReLU(0.1), "leaky_relu:0.1"),
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), None),
        (nn.Hardswish(), "hardswish"),
        (nn.Tanh(), None),
    ],
)
def test_activations_are_taken_in(module, name):
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), module)
    twin = fuse(model)
    assert twin.get_submodule("0").activation == name
    assert sum(1 for _ in twin.children()) == (1 if name else 2)
    x = torch.randn(1, 8, 5, 5)
    assert torch.allclose(twin(x), model(x), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_between_convs_compute_the_same(dtype):
    pytest.importorskip("triton")
    chain = nn.Sequential(nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU(inplace=True))
    right, x = copy.deepcopy(chain).double().to(DEVICE), torch.randn(2, 24, 9, 8, device=DEVICE).to(dtype)
    twin, leaf = fuse(chain.to(DEVICE)), x.clone().requires_grad_()
    wide = x.double().requires_grad_()
    with forced("on"), torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = twin(leaf)
    assert y.dtype == dtype
    assert "lowrank" in str(y.grad_fn.next_functions[0][0])
    exact = right(wide)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.linalg.vector_norm(y - exact) <= limit * torch.linalg.vector_norm(exact)
    # Rounded values may win other windows: what a window is given must arrive somewhere all the same.
    grads = [torch.autograd.grad(out.square().sum(), leaf)[0] for out, leaf in ((y, leaf), (exact, wide))]
    if dtype == torch.float32:
        assert torch.linalg.vector_norm(grads[0] - grads[1]) <= 1e-4 * torch.linalg.vector_norm(grads[1])
    assert torch.allclose(chain[0].running_var.double(), right[0].running_var, atol=1e-3)
    assert chain[0].num_batches_tracked == 1


def test_what_torch_refuses_is_refused():
    pytest.importorskip("triton")
    norm = fuse(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()).to(DEVICE))
    with forced("on"), pytest.raises(ValueError, match="more than 1 value"):
        norm(torch.randn(1, 8, 1, 1, device=DEVICE))
    with forced("on"), pytest.raises(RuntimeError, match="pad"):
        fuse(nn.MaxPool2d(2, padding=2))(torch.randn(1, 8, 4, 4, device=DEVICE))


def test_a_cumulative_average_is_left_to_torch():
    pytest.importorskip("triton")
    chain, x = nn.Sequential(nn.BatchNorm2d(8, momentum=None), nn.ReLU()), torch.randn(2, 8, 3, 3)
    right = copy.deepcopy(chain)
    with forced("on"):
        for scale in (1, 2):
            assert torch.equal(fuse(chain)(x * scale), right(x * scale))
    assert torch.equal(chain[0].running_var, right[0].running_var)
