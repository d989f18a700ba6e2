import math

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.init import (
    INITIALISATIONS,
    composite_sigma,
    followed_by_relu,
    init_,
)
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import build_conv
from lowrank_cnn.method.spec import Composite
from lowrank_cnn.models import create_model

WIDTH, DEPTH = 384, 30  # in narrower layers the spread of one draw over thirty of them exceeds a factor 2
MIXES = (
    [(3, 1, 192), (1, 3, 192)],
    [(3, 1, 144), (1, 3, 144), (3, 3, 96)],
    [(5, 1, 160), (1, 5, 160), (1, 1, 64)],
)


def deep_stack(padding_mode: str = "circular") -> nn.Sequential:
    """Thirty composites of three mixes of shapes, each with its ReLU."""
    convs = (CompositeConv2d(WIDTH, MIXES[i % 3], padding_mode=padding_mode) for i in range(DEPTH))
    return nn.Sequential(*(layer for conv in convs for layer in (conv, nn.ReLU())))


def gradient_ratio(stack: nn.Sequential) -> float:
    """Variance of the gradient that arrives at the input, over that of the one sent in at the top."""
    x = torch.randn(4, WIDTH, 6, 6, requires_grad=True)
    out = stack(x)
    sent = torch.randn_like(out)
    (arrived,) = torch.autograd.grad(out, x, sent)
    return (arrived.var() / sent.var()).item()


def test_gradients_keep_their_variance_through_thirty_mixed_layers():
    torch.manual_seed(0)
    assert 0.5 < gradient_ratio(init_(deep_stack())) < 2


def test_a_network_can_be_built_with_another_initialisation():
    torch.manual_seed(0)
    nets = {name: create_model("nin-c3-lr", init=name) for name in INITIALISATIONS}
    std = {name: std_of(*net.features.conv3_1.weights) for name, net in nets.items()}
    assert std["composite"] == pytest.approx(math.sqrt(2 / (3 * 192)), rel=0.03)
    assert std["per-group"] == pytest.approx(math.sqrt(2 / (3 * 96)), rel=0.03)
    assert std["torch"] == pytest.approx(math.sqrt(1 / (3 * 3 * 192)), rel=0.03)
    with pytest.raises(LowRankError, match="there is no initialisation"):
        create_model("nin", init="xavier")


def test_sigma_is_the_papers():
    composite = Composite.of([(3, 1, 32), (1, 3, 32)])
    assert composite_sigma(composite) == pytest.approx(math.sqrt(2 / 192))
    assert composite_sigma(composite, relu=False) == pytest.approx(math.sqrt(1 / 192))
    assert composite_sigma(composite, channel_groups=2) == pytest.approx(math.sqrt(2 / 96))


def std_of(*weights: Tensor) -> float:
    return torch.cat([w.flatten() for w in weights]).std().item()


def test_init_finds_composites_joins_and_dense_layers():
    torch.manual_seed(0)
    net = create_model("vgg11-gmp-lr-join", num_classes=100, width=0.5)
    block, head = net.features.conv4_2, net.head
    assert std_of(*block.basis.weights) == pytest.approx(math.sqrt(1 / (3 * 256)), rel=0.03)
    assert std_of(block.join.weight) == pytest.approx(math.sqrt(2 / 256), rel=0.03)
    assert std_of(head.fc7.weight) == pytest.approx(math.sqrt(2 / 2048), rel=0.03)
    assert std_of(head.fc8.weight) == pytest.approx(math.sqrt(1 / 2048), rel=0.03)
    assert all(p.abs().sum() == 0 for name, p in net.named_parameters() if name.endswith("bias"))


def test_a_relu_is_found_where_it_follows():
    net = nn.Sequential(
        build_conv(3, 8, 3, "separable"),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3),
    )
    assert followed_by_relu(net) == {"0.first": False, "0.second": True, "3": False, "5": False}


def test_activations_called_as_functions_are_assumed_but_for_the_last_layer():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    assert followed_by_relu(Functional()) == {"conv": True, "fc": False}


def test_the_caller_may_say_what_follows():
    torch.manual_seed(0)
    net = init_(nn.Sequential(nn.Linear(512, 256), nn.ReLU()), relu=lambda name, module: False)
    assert net[0].weight.std().item() == pytest.approx(math.sqrt(1 / 512), rel=0.02)


def test_few_classes_do_not_make_large_logits():
    torch.manual_seed(0)
    x = torch.randn(8, 3, 64, 64)
    spreads = {n: create_model("vgg11-gmp-lr", num_classes=n, width=0.25).eval()(x).std().item() for n in (2, 200)}
    assert max(spreads.values()) < 1


def test_a_chain_alone_is_initialised():
    torch.manual_seed(0)
    chain = init_(build_conv(64, 64, 3, "lr-join"))
    assert std_of(*chain.basis.weights) == pytest.approx(math.sqrt(1 / 192), rel=0.05)


def test_what_is_no_module_is_refused_in_a_sentence():
    with pytest.raises(LowRankError, match=r"^the model must be of type Module, not 'x'\.$"):
        init_("x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "scheme", ["dense", "lr", "lr-join", "lr-join(m=0.25)", "separable", "mixture(kx1, kxk, join)"]
)
def test_signals_and_gradients_keep_their_second_moment_on_average(scheme: str):
    """Of one layer, over many draws of its weights: single draws of narrow layers lie wide apart."""
    torch.manual_seed(0)
    x, sent = torch.randn(8, 16, 5, 5).relu().requires_grad_(), torch.randn(8, 16, 5, 5)
    forward, backward = 0.0, 0.0
    for _ in range(80):
        y = init_(nn.Sequential(build_conv(16, 16, 3, scheme, padding_mode="circular"), nn.ReLU()))(x)
        (arrived,) = torch.autograd.grad(y, x, sent)
        forward += (y.square().mean() / x.square().mean()).item() / 80
        backward += (arrived.square().mean() / sent.square().mean()).item() / 80
    assert (forward, backward) == pytest.approx((1, 1), abs=0.15)
