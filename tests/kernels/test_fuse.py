"""A fused copy computes what the model computes, forward and backward, on the same parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.conv.pack import pack_rows
from lowrank_cnn.kernels.fuse import FusedComposite, freeze, fuse, fuse_neighbours
from lowrank_cnn.kernels.modules import FusedNorm, FusedPool
from lowrank_cnn.method.layers import CompositeConv2d, build_conv
from lowrank_cnn.models import create_model

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


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


def test_relu_and_pool_are_taken_in():
    twin = fuse(network("lr"))
    first, second = (layer for layer in twin.modules() if isinstance(layer, FusedComposite))
    assert (first.activation, first.pool) == ("relu", "ceil")
    assert (second.activation, second.pool) == ("relu", None)
    assert not any(isinstance(layer, nn.ReLU) for layer in twin.modules())


def test_the_model_is_left_alone_and_shares_its_parameters():
    model = network("lr-join")
    before = list(model.state_dict())
    twin = fuse(model)
    assert list(model.state_dict()) == before
    assert {id(p) for p in twin.parameters()} == {id(p) for p in model.parameters()}


def test_fused_kernels_in_a_network():
    pytest.importorskip("triton")
    model, x = network("lr").to(DEVICE), torch.randn(1, 3, 14, 14, device=DEVICE)
    exact = model.double()(x.double())
    model.float()
    with forced("on"):
        y = fuse(model)(x)
    assert torch.linalg.vector_norm(y - exact) <= 5e-3 * torch.linalg.vector_norm(exact)


@pytest.mark.parametrize("scheme", ["lr", "lr-join"])
def test_frozen_weights_are_packed_once_for_all(scheme):
    model, x = network(scheme).double(), torch.randn(1, 3, 14, 14, dtype=torch.float64)
    exact = model(x)
    twin = freeze(model)
    for layer in twin.modules():
        if isinstance(layer, FusedComposite):
            packed = pack_rows(list(layer.weights), torch.float64)
            assert packed.data_ptr() == layer.weights[0].data_ptr()
            assert not any(weight.requires_grad for weight in layer.weights)
    assert torch.allclose(twin(x), exact)
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert torch.allclose(twin(x), exact)


def normed(dtype=torch.float32):
    """A network with batch norms, one of them without a ReLU, and a pool that no conv takes."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.Dropout(0.5),
        nn.Sequential(nn.BatchNorm2d(16, affine=False), nn.ReLU()), nn.Flatten(), nn.Linear(16 * 16, 4),
    )  # fmt: skip
    return model.to(DEVICE, dtype)


def test_norm_and_relu_become_one_and_pools_know_the_kernels():
    twin = fuse(normed())
    assert sum(isinstance(layer, FusedNorm) for layer in twin.modules()) == 2
    assert sum(isinstance(layer, FusedPool) for layer in twin.modules()) == 1
    assert sum(type(layer) is nn.BatchNorm2d for layer in twin.modules()) == 1
    assert not any(isinstance(layer, nn.ReLU | nn.MaxPool2d) for layer in twin.modules())


@pytest.mark.parametrize(
    "layer",
    [
        nn.SyncBatchNorm(4), nn.BatchNorm3d(4), nn.MaxPool2d(2, return_indices=True), nn.MaxPool2d(2, dilation=2),
        nn.LocalResponseNorm(99), nn.LocalResponseNorm(5, alpha=-1.0), nn.CrossMapLRN2d(5),
    ],
)  # fmt: skip
def test_others_stay_as_they_are(layer):
    assert fuse(nn.Sequential(layer, nn.ReLU()))[0] is layer


def test_neighbours_alone_can_be_fused():
    pool, norm = nn.MaxPool2d(3, 1, 1), nn.LocalResponseNorm(5)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), pool, nn.Sequential(norm, pool), nn.MaxPool2d(2, return_indices=True))
    net.eval()
    assert fuse_neighbours(net) == 3
    kinds = [type(module).__name__ for module in net.modules()]
    assert kinds == [
        "Sequential",
        "Conv2d",
        "FusedPool",
        "Sequential",
        "FusedResponseNorm",
        "FusedPool",
        "MaxPool2d",
    ]
    assert not any(module.training for module in net.modules())


def test_the_copy_follows_the_model():
    model = normed()
    twin = fuse(model)
    assert {id(b) for b in twin.buffers()} == {id(b) for b in model.buffers()}
    model.double()
    x = torch.randn(2, 3, 8, 8, device=DEVICE, dtype=torch.float64)
    model.eval()
    assert torch.equal(twin(x), model(x))
    model.train()
    before = copy.deepcopy(model.state_dict())
    twin(x)
    assert model[1].num_batches_tracked == before["1.num_batches_tracked"] + 1
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    twin.eval()
    assert not any(model[at].training for at in (1, 5, 6))


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


def test_switched_off_nothing_but_torch_runs():
    model, x = normed(), torch.randn(2, 3, 8, 8, device=DEVICE)
    model[6].p = 0.0
    twin, plain = fuse(model), copy.deepcopy(model)
    with forced("off"):
        y = twin[1](F.conv2d(x, model[0].weight, model[0].bias, padding=1))
    right = F.relu(plain[1](plain[0](x)))
    assert "lowrank" not in str(y.grad_fn)
    assert torch.equal(y, right)


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
    model.eval(), right.eval()
    with forced("on"), torch.no_grad():
        assert torch.allclose(twin(x).double(), right(x.double()), atol=10 * limit)


def test_a_step_that_comes_twice_runs_twice():
    relu = nn.ReLU()
    inner = nn.Sequential(nn.Conv2d(8, 8, 3), relu)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), relu, inner, nn.BatchNorm2d(8), inner), torch.randn(2, 3, 9, 9)
    assert torch.allclose(fuse(model.eval())(x), model(x), atol=1e-6)


class Branches(nn.Module):
    """One module under two names, and a name for none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())
        self.register_module("third", None)

    def forward(self, x):
        return self.second(self.first(x)) if self.third is None else x


def test_every_name_is_kept():
    model, x = Branches(), torch.randn(2, 3, 4, 4)
    assert torch.allclose(fuse(model)(x), model(x))


def test_names_that_meet_are_kept_apart():
    steps = {"a": nn.Sequential(nn.Conv2d(3, 3, 1)), "a_0": nn.Conv2d(3, 4, 1), "a_0_1": nn.Conv2d(4, 2, 1)}
    model, x = nn.Sequential(), torch.randn(2, 3, 4, 4)
    for name, step in steps.items():
        model.add_module(name, step)
    assert torch.allclose(fuse(model)(x), model(x), atol=1e-6)


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


def test_where_triton_cannot_build_torch_runs(monkeypatch):
    pytest.importorskip("triton")
    from lowrank_cnn.kernels import modules
    from lowrank_cnn.kernels.between import statistics

    def fails(*_):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(statistics, "launch_statistics", fails)
    monkeypatch.setattr(modules, "_ABLE", {})
    chain = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).to(DEVICE)
    x = torch.randn(2, 8, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with forced("on"):
        assert torch.equal(fuse(chain)(x), chain(x))
    assert list(modules._ABLE.values()) == [False]


def test_triton_is_asked_again_where_memory_ran_out(monkeypatch):
    pytest.importorskip("triton")
    from lowrank_cnn.kernels import modules
    from lowrank_cnn.kernels.between import statistics

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(statistics, "launch_statistics", fails)
    monkeypatch.setattr(modules, "_ABLE", {})
    assert not modules._able(torch.device("cpu"))
    assert modules._ABLE == {}


def frozen_layer(groups=((3, 1, 8), (1, 3, 8)), channels=8, **options):
    layer = CompositeConv2d(channels, list(groups), **options).to(DEVICE)
    return layer, freeze(nn.Sequential(layer, nn.SiLU()))


@pytest.mark.parametrize("channels", [16, 3])
def test_frozen_weights_are_packed_once(monkeypatch, channels):
    """In the layout that the chosen kernel reads: rows for many channels, the union of taps for few."""
    from lowrank_cnn.kernels.conv import launch

    layer, net = frozen_layer(channels=channels)
    x = torch.randn(2, channels, 6, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    made, pack = [], launch.pack_weights
    monkeypatch.setattr(launch, "pack_weights", lambda layout, *rest: made.append(layout) or pack(layout, *rest))
    with torch.no_grad(), forced("on"):
        found = [net(x) for _ in range(3)]
        right = F.silu(layer(x))
    assert made[0] == ("rows" if channels == 16 else "union")
    assert len(made) == 2  # the frozen layer's once, and the plain layer's
    assert all(torch.allclose(y, right, atol=1e-2 if GPU else 1e-5) for y in found)
    assert list(net.state_dict()) == ["0.bias", "0.weights.0", "0.weights.1"]


def test_a_frozen_layer_under_autocast_packs_in_the_type_it_computes_in():
    layer, net = frozen_layer(channels=16)
    x = torch.randn(2, 16, 6, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), forced("on"):
        net(x)
        with torch.autocast(DEVICE, dtype=torch.float16):
            y = net(x)
        right = F.silu(layer(x))
    assert y.dtype == torch.float16
    assert torch.linalg.vector_norm(y - right) <= 1e-2 * torch.linalg.vector_norm(right)


def test_weights_loaded_into_a_frozen_layer_are_packed_again():
    (_, net), (layer, other) = frozen_layer(), frozen_layer()
    x = torch.randn(2, 8, 6, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), forced("on"):
        net(x)
        net.load_state_dict(other.state_dict())
        assert torch.allclose(net(x), F.silu(layer(x)), atol=1e-2 if GPU else 1e-5)


@pytest.mark.parametrize("warm", [False, True])
def test_torch_compile_takes_a_frozen_layer_whole(warm):
    torch._dynamo.reset()
    layer, net = frozen_layer()
    x = torch.randn(2, 8, 6, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    graphs = []

    def noting(graph, inputs):
        graphs.append(graph)
        return graph

    with torch.no_grad(), forced("on"):
        if warm:
            net(x)
        y = torch.compile(net, backend=noting, fullgraph=True)(x)
        assert torch.allclose(y, F.silu(layer(x)), atol=1e-2 if GPU else 1e-5)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any("packed_conv2d" in name for name in called)
    assert any("pack_weights" in name for name in called) is not warm


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
    assert twin[0].activation == name
    assert len(twin) == (1 if name else 2)
    x = torch.randn(1, 8, 5, 5)
    assert torch.allclose(twin(x), model(x), atol=1e-6)


def test_the_pool_of_a_resnets_stem_is_taken_in():
    model = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    twin = fuse(model)
    assert [(layer.activation, layer.pool) for layer in twin] == [("relu", "3x3/2")]
    x = torch.randn(2, 3, 22, 20)
    assert torch.allclose(twin(x), model(x), atol=1e-6)
