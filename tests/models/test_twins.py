import pytest
from torch import Tensor, nn

from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.models.build import baseline_of, dense_cost, dense_twin

SIZE = (3, 32, 48)


class Odd(nn.Module):
    """Strides, channel groups, a conv without bias, and one that runs twice on maps of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 8, 5, stride=2, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
        self.last = nn.Conv2d(8, 6, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.wide(x))
        return self.last(self.twice(nn.functional.max_pool2d(x, 2)))


def cost(model: nn.Module) -> tuple[int, int]:
    counted = count(model, SIZE)
    return counted.macs, counted.params


SCHEMES = ["lr", "lr-join(m=3)", "separable(m=4)", "mixture(kx1, 1xk, kxk, join)", "lr(5x1, 1x5)"]
BRANCHED = ["lr(branches)", "lr-join(m=3, branches)", "mixture(kx1=3, 1xk=3, kxk=2, branches)"]


@pytest.mark.parametrize("scheme", [*SCHEMES, *BRANCHED])
def test_a_converted_network_knows_what_it_cost_before(scheme: str):
    dense = Odd()
    converted = convert(dense, scheme)
    assert cost(converted)[0] != cost(dense)[0]
    assert dense_cost(converted, SIZE) == cost(dense)
    in_steps = convert(convert(dense, scheme, where="wide"), "lr", where="last")
    assert dense_cost(in_steps, SIZE) == cost(dense)


@pytest.mark.parametrize("scheme", ["lr", "lr-join", "lr(branches)", "dense(branches)"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_network_that_is_one_conv(scheme: str, bias: bool):
    conv = nn.Conv2d(3, 8, 3, padding=1, bias=bias)
    assert dense_cost(convert(conv, scheme), SIZE) == cost(conv)


def test_a_network_that_was_never_converted_is_its_own():
    assert dense_cost(Odd(), SIZE) == cost(Odd())


def test_what_is_not_known_is_not_guessed():
    by_hand = nn.Sequential(CompositeConv2d(3, [(3, 1, 4), (1, 3, 4)]), nn.ReLU(), nn.Conv2d(8, 8, 3))
    assert dense_cost(by_hand, SIZE) is None
    assert dense_cost(convert(by_hand, "lr"), SIZE) is None


def test_a_merged_network_costs_what_it_did_before_it_was_converted():
    merged = merge(convert(nn.Sequential(nn.Conv2d(3, 8, 3)), "lr-join").eval(), chains=True)
    assert dense_cost(merged, SIZE) == cost(nn.Conv2d(3, 8, 3))


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("vgg11-gmp-lr-join-wfull", "vgg11-gmp"),
        ("vgg11-gmp-lr-2x", "vgg11-gmp"),
        ("googlenet-lr-conv1", "googlenet"),
        ("nin-c3-lr", "nin"),
        ("resnet18-lr-late", "resnet18"),
        ("resnet18-small-lr", "resnet18-small"),
        ("airbench-lr", "airbench"),
    ],
)
def test_a_networks_twin_is_its_familys_dense_baseline(name: str, twin: str):
    net = create_model(name, width=0.05, norm="batch", num_classes=7)
    found = dense_twin(net)
    assert found.config == {**net.config, "name": twin}


def test_dense_networks_have_no_twin_and_converted_ones_do():
    dense = [name for name in list_models() if dense_twin(create_model(name, width=0.05)) is None]
    assert dense == ["vgg11", "vgg11-gmp", "googlenet", "nin", "resnet18", "resnet18-small", "airbench"]
    assert dense_twin(nn.Conv2d(3, 4, 3)) is None
    converted = convert(create_model("nin", width=0.05), "lr")
    assert dense_twin(converted).config == converted.config
    assert dense_twin(create_model("nin", width=0.05, scheme="lr")).config["scheme"] is None


def test_a_name_that_only_begins_alike_is_its_own_baseline():
    assert [baseline_of(name) for name in ("nin-c3", "ninety", "vgg11-gmp-lr")] == ["nin", "ninety", "vgg11-gmp"]
