import csv
from importlib.resources import files

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.count import count
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.models import create_model

PUBLISHED = {
    row["network"]: row
    for row in csv.DictReader((files("lowrank_cnn.paper") / "published.csv").read_text().splitlines())
    if row["table"] in ("vgg-ilsvrc", "googlenet-ilsvrc", "nin-cifar10")
}
EXACT = [name for name, row in PUBLISHED.items() if row["counts_reproduced"] == "yes"]


def on_meta(name: str, **options) -> nn.Module:
    with torch.device("meta"):
        return create_model(name, **options)


@pytest.mark.parametrize("name", EXACT)
def test_counts_are_the_published_integers(name: str):
    net = on_meta(name)
    result = count(net, net.input_size, convention="paper")
    assert result.macs == int(PUBLISHED[name]["macs"])
    assert result.params == int(PUBLISHED[name]["params"])


def fvcore_macs(net: nn.Module, size: tuple[int, ...]) -> int:
    analysis = pytest.importorskip("fvcore.nn").FlopCountAnalysis(net.eval(), torch.randn(1, *size))
    analysis.unsupported_ops_warnings(False)
    analysis.uncalled_modules_warnings(False)
    return sum(n for op, n in analysis.by_operator().items() if op in ("conv", "linear", "matmul", "addmm", "bmm"))


@pytest.mark.parametrize(
    "name",
    ["nin", "nin-c3-lr", "vgg11", "vgg11-gmp-lr-join", "vgg11-gmp-sf", "googlenet-lr", "resnet18-lr", "airbench"],
)
def test_our_networks_agree_with_fvcore(name: str):
    net = create_model(name, width=1.0 if name.startswith("nin") else 0.125)
    assert count(net, net.input_size).macs == fvcore_macs(net, net.input_size)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, dim=-1)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4))


def dilated() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, (3, 5), dilation=2, padding=(2, 4)), nn.Flatten(), nn.Linear(8 * 81, 10))


def transposed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 6, 3, stride=2))


def attention() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 1), Attention())


@pytest.mark.parametrize("make", [grouped, dilated, transposed, attention])
def test_plain_torch_networks_agree_with_fvcore(make):
    net, size = make(), (3, 9, 9)
    assert count(net, size).macs == fvcore_macs(net, size)


def test_what_a_container_computes_itself_is_booked_on_it():
    class Product(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x.transpose(-1, -2)

    (layer,) = count(nn.Sequential(Product()), (1, 4, 6)).layers
    assert (layer.name, layer.macs) == ("0", 4 * 4 * 6)


def test_a_module_with_two_names_costs_twice_weighs_once_and_keeps_its_weights():
    net = nn.ModuleDict({"conv": nn.Conv2d(4, 4, 3, padding=1, bias=False)})
    net["again"], net["tied"] = nn.Sequential(net["conv"]), nn.Conv2d(4, 4, 3, padding=1, bias=False)
    net["tied"].weight = net["conv"].weight
    before = net["conv"].weight.clone()
    net.forward = lambda x: net["tied"](net["again"](net["conv"](x)))
    result = count(net, (4, 8, 8))
    assert (result.macs, result.params) == (3 * 9 * 16 * 64, 9 * 16)
    assert torch.equal(net["conv"].weight, before)
    assert net["tied"].weight is net["conv"].weight is net["again"][0].weight


def test_the_auxiliary_heads_count_in_the_papers_convention_alone():
    net = on_meta("googlenet")
    assert not any("aux" in layer.name for layer in count(net, net.input_size).layers)
    assert any("aux" in layer.name for layer in count(net, net.input_size, convention="paper").layers)
    assert count(net, net.input_size).params == 5_973_552 + 1024 * 1000 + 1000


def test_a_bias_costs_one_mac_per_filter_in_the_papers_convention():
    layer = CompositeConv2d(2, [(3, 1, 4), (1, 3, 4)])
    assert count(layer, (2, 5, 5), convention="paper").macs == count(layer, (2, 5, 5)).macs + 8


def test_double_precision_models_count_too():
    result = count(nn.Conv2d(3, 4, 3).double(), (3, 8, 8))
    assert result.activation_bytes == 4 * 36 * 8


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: count(nn.Conv2d(3, 4, 3), (3, 8)), "does not take an input of 3x8"),
        (lambda: count(nn.Conv2d(3, 4, 3), 32), "channels, height, width"),  # type: ignore[arg-type]
        (lambda: count("net", (3, 8, 8)), "a model is an nn.Module, not str"),  # type: ignore[arg-type]
        (lambda: count(nn.Conv2d(3, 4, 3), (5, 8, 8)), "does not take an input of 5x8x8"),
        (
            lambda: count(nn.Sequential(nn.Flatten(), nn.Linear(10, 2)), (3, 8, 8)),
            "does not take an input of 3x8x8",
        ),
        (lambda: count(nn.Conv2d(3, 4, 3), (3, 8, 8), convention="flops"), "convention must be mac or paper"),
        (
            lambda: count(torch.jit.script(nn.Conv2d(3, 4, 3)), (3, 8, 8)),
            "is scripted: give the module",
        ),
        (lambda: count(nn.DataParallel(nn.Conv2d(3, 4, 3)), (3, 8, 8)), r"count its `\.module`"),
        (lambda: count(on_meta("vgg11"), (3, 64, 64)), "takes 224x224 images"),
        (lambda: count(on_meta("vgg11-gmp"), (1, 64, 64)), r"takes images as \[N, 3, H, W\]"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, says: str):
    with pytest.raises(LowRankError, match=says):
        call()


def test_a_lazy_layer_is_refused_and_stays_lazy():
    net = nn.Sequential(nn.ReLU(), nn.LazyConv2d(4, 3))
    with pytest.raises(LowRankError, match="1 is lazy: run the model once"):
        count(net, (3, 8, 8))
    assert net(torch.zeros(1, 5, 8, 8)).shape == (1, 4, 6, 6)


class Forward(nn.Module):
    """A conv, and a function of the module and what the conv gives."""

    def __init__(self, function, **attributes: object) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3), function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self, self.conv(x))


def test_functions_called_in_forward_find_their_tensors():
    net = Forward(lambda _, y: F.conv2d(y + torch.zeros(1), torch.ones(2, 4, 1, 1)))
    assert count(net, (3, 8, 8)).macs == 36 * 4 * 27 + 36 * 4 * 2


def test_a_tensor_in_a_plain_attribute_is_no_obstacle():
    scale = torch.ones(4, 1, 1)
    net = Forward(lambda net, y: y * net.scale * net.listed[0], scale=scale, listed=[scale])
    assert count(net, (3, 8, 8)).macs == 36 * 4 * 27
    assert net.scale is net.listed[0] is scale


@pytest.mark.parametrize(
    "function",
    [
        lambda _, y: y * y.sum().item(),
        lambda _, y: y[y > 0],
        lambda _, y: y.numpy().sum(),
        lambda _, y: y * torch.ones(4, 1, 1, device="cpu"),
        lambda _, y: y.view(7, 7),
    ],
)
def test_a_forward_that_needs_values_is_refused(function):
    with pytest.raises(LowRankError, match="does not take an input of 3x8x8 without values"):
        count(Forward(function), (3, 8, 8))


def test_operations_that_are_not_known_are_listed():
    net = Forward(lambda net, y: net.pairs(y, y), pairs=nn.Bilinear(6, 6, 2))
    found = count(net, (3, 8, 8))
    assert found.unsupported == (("aten._trilinear", 1),)
    assert found.macs == 36 * 4 * 27


def test_all_that_common_networks_do_is_known():
    layers = [
        nn.Conv2d(3, 16, 4, 4),
        nn.GroupNorm(4, 16),
        nn.GELU(),
        nn.PixelShuffle(2),
        nn.Upsample(scale_factor=2),
    ]
    layers += [nn.BatchNorm2d(4), nn.AvgPool2d(2), nn.MaxPool2d(2), nn.Flatten(2)]
    layers += [nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.LSTM(4, 8, batch_first=True)]
    assert count(nn.Sequential(*layers), (3, 8, 8)).unsupported == ()
    for name in ("googlenet-lr", "nin-c3-lr", "vgg11-gmp-lr-lde"):
        with torch.device("meta"):
            net = create_model(name)
        assert count(net, net.input_size).unsupported == ()


def test_products_with_a_vector_count():
    net = Forward(lambda _, y: y.flatten(1) @ torch.ones(y[0].numel()))
    assert count(net, (3, 8, 8)).macs == 36 * 4 * 27 + 144


def test_a_module_of_torch_export_is_counted_on_an_input_of_its_size():
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(), nn.Conv2d(4, 5, 1)).eval(), torch.zeros(2, 3, 8, 8)
    exported = torch.export.export(net, (x,)).module()
    assert count(exported, x).macs == count(net, x).macs
    with pytest.raises(LowRankError, match="does not take an input of 3x8x8"):
        count(exported, (3, 8, 8))
