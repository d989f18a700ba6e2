"""Every network of every family: what is listed, built, run and refused."""

import math

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.models.airbench import PatchConv2d, begin_as_identity_
from lowrank_cnn.models.googlenet import AuxiliaryPool

SMALL = {"width": 0.0625}
SCHEMES = ["lr", "lr-join", "separable", "mixture(kx1=3, 1xk=3, kxk=2, join)", "embed"]


def shapes(net: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in net.state_dict().items()}


def test_every_network_is_listed_and_the_papers_come_first():
    """The golden counts name every network; `vgg11` and `convnext-small-dw3` are the first and the last."""
    paper, every = list_models(paper=True), list_models()
    assert (len(paper), len(every), every[: len(paper)]) == (14, 28, paper)
    assert (every[0], paper[-1], every[14], every[-1]) == ("vgg11", "nin-c3-lr", "resnet18", "convnext-small-dw3")


@pytest.mark.parametrize("norm", [None, "batch"])
@pytest.mark.parametrize("name", list_models())
def test_every_network_runs_forward_and_backward(name: str, norm: str | None):
    torch.manual_seed(0)
    net = create_model(name, num_classes=7, norm=norm, dropout=0.0, **SMALL).train()
    size = 224 if name == "vgg11" else 64
    x = torch.randn(2, 3, size, size)
    out = net(x)
    outputs = out if isinstance(out, tuple) else (out,)
    assert all(o.shape == (2, 7) for o in outputs)
    sum(o.logsumexp(1).sum() for o in outputs).backward()
    free = [p for p in net.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in free)
    assert net.eval()(x).shape == (2, 7)


@pytest.mark.parametrize("name", list_models())
def test_the_first_loss_is_that_of_guessing(name: str):
    torch.manual_seed(0)
    net = create_model(name, num_classes=20, dropout=0.0, width=0.25).train()
    size = 224 if name == "vgg11" else 64
    outputs = net(torch.randn(8, 3, size, size))
    for logits in outputs if isinstance(outputs, tuple) else (outputs,):
        assert nn.functional.cross_entropy(logits, torch.arange(8)).item() == pytest.approx(math.log(20), abs=2)


@pytest.mark.parametrize("name", list_models())
def test_the_configuration_builds_the_same_network(name: str):
    with torch.device("meta"):
        net = create_model(name, num_classes=5, in_channels=1, norm="batch", width=0.125)
        twin = create_model(**net.config)
    assert repr(net) == repr(twin)
    assert shapes(net) == shapes(twin)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("vgg11-gmp", "mixture(kx1, 1xk, kxk=2, join)"),
        ("nin", "separable(m=0.5)"),
        ("googlenet", "lr-join(m=0.5)"),
        *(("airbench", scheme) for scheme in SCHEMES),
    ],
)
def test_any_family_takes_any_scheme(name: str, scheme: object):
    net = create_model(name, scheme=scheme, num_classes=4, **SMALL).eval()
    assert any(isinstance(m, FactoredConv2d | CompositeConv2d) for m in net.modules())
    assert net(torch.randn(1, 3, 64, 64)).shape == (1, 4)
    assert net.config["scheme"] == ("lr-join(m=0.5)" if isinstance(scheme, dict) else scheme)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "vgg11-gmp-rl"}, "did you mean .*vgg11-gmp-lr"),
        ({"name": "resnet"}, "there is no network 'resnet'"),
        ({"norm": "layer"}, "norm is None or 'batch'"),
        ({"width": 0}, "width must be a number above 0"),
        ({"width": float("nan")}, "width must be a number above 0"),
        ({"width": 1e9}, "at most 64"),
        ({"width": "a"}, "width must be a number above 0"),
        ({"stride": 1.5}, "stride must be a whole number of at least 1"),
        ({"dropout": "a"}, "dropout must be a number of at least 0 and below 1"),
        ({"dropout": 1.5}, "dropout must be a number of at least 0 and below 1"),
        ({"num_classes": -1}, "num_classes must be a whole number of at least 1"),
        ({"scheme": "lowrank"}, "there is no scheme"),
        ({"name": "vgg11", "image_size": 0}, "image_size must be a whole number of at least 1"),
        ({"name": "vgg11", "image_size": "64"}, "image_size must be a whole number of at least 1"),
        ({"pool": "mean"}, "None .* or 'average'"),
        ({"name": "vgg11", "pool": "average"}, "vgg11 has none"),
        ({"name": "resnet18", "scheme": "embed"}, "equal width"),
        ({"init": "he"}, "there is no initialisation 'he'"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options: dict, says: str):
    with pytest.raises(LowRankError, match=says):
        create_model(**{"name": "nin", **options})


@pytest.mark.parametrize(("name", "least"), [("googlenet", 32), ("nin", 4), ("airbench", 9), ("vgg11-gmp-lr", 1)])
def test_the_smallest_image_runs_and_a_smaller_one_is_refused(name: str, least: int):
    net = create_model(name, num_classes=3, **SMALL).train()
    net(torch.randn(2, 3, least, least))
    with pytest.raises(LowRankError, match="takes images as"):
        net(torch.randn(1, 1, 30, 30))
    if least > 1:
        with pytest.raises(LowRankError, match=f"takes images of {least}x{least} at least"):
            net(torch.randn(2, 3, least - 1, least - 1))


def test_width_scales_all_filters_and_stride_is_the_first_convs():
    with torch.device("meta"):
        assert create_model("vgg11-gmp", width=0.5).features.conv5_2.out_channels == 256
        assert create_model("nin", width=2.0).features.conv1_1.out_channels == 384
        net = create_model("vgg11-gmp-lr", stride=2)
        assert net.features.conv1_1(torch.empty(1, 3, 224, 224)).shape == (1, 64, 112, 112)
    assert net.features.conv2_1.stride == (1, 1)


@pytest.mark.parametrize("name", ["vgg11-gmp-lr", "googlenet", "nin"])
def test_the_image_size_of_most_networks_is_only_what_they_are_counted_at(name: str):
    with torch.device("meta"):
        plain, sized = create_model(name), create_model(name, image_size=64)
    assert sized.input_size == (3, 64, 64)
    assert shapes(plain) == shapes(sized)


@pytest.mark.parametrize(("size", "stride", "side"), [(224, 1, 7), (64, 1, 2), (56, 1, 2), (224, 2, 4)])
def test_vgg11_is_made_to_fit_an_image_size(size: int, stride: int, side: int):
    net = create_model("vgg11", num_classes=5, image_size=size, stride=stride, **SMALL).eval()
    assert net.input_size == (3, size, size)
    assert net.head.fc6.in_features == 32 * side**2
    assert net(torch.randn(1, 3, size, size)).shape == (1, 5)
    with pytest.raises(LowRankError, match=f"takes {size}x{size} images"):
        net(torch.randn(1, 3, 4 * size, 4 * size))


@pytest.mark.parametrize(("maps", "means"), [(14, 5), (12, 5), (8, 2), (7, None), (4, 1), (2, None)])
def test_auxiliary_heads_see_sixteen_places_of_maps_of_any_size(maps: int, means: int | None):
    x = torch.arange(maps * maps, dtype=torch.float32).view(1, 1, maps, maps)
    pooled = AuxiliaryPool()(x)
    assert pooled.shape == (1, 1, 4, 4)
    assert len(pooled.unique()) == 16 or maps == 2
    if means is not None:
        assert pooled[0, 0, 0, 0] == x[0, 0, :means, :means].mean()


@pytest.mark.parametrize("init", ["composite", "torch"])
@pytest.mark.parametrize("name", ["nin", "nin-c3", "nin-c3-lr"])
def test_no_class_of_nin_starts_dark(name, init):
    torch.manual_seed(0)
    network = create_model(name, init=init).eval()
    maps = network.features(torch.randn(4, 3, 30, 30))
    assert ((maps > 0).float().mean(dim=(0, 2, 3)) > 0.2).all()
    assert network(torch.randn(4, 3, 30, 30)).std() < 1


def test_the_dense_resnets_cost_what_resnet18_costs():
    large, small = (create_model(name) for name in ("resnet18", "resnet18-small"))
    published, stem, classes = 1_814_073_344, 112 * 112 * 147 * 64, 512 * 1000  # as torchvision's
    assert lr.count(large, large.input_size).macs == published
    blocks = (published - stem - classes) * 64**2 // 56**2  # the same, on maps of 64 pixels and not 56
    assert lr.count(small, small.input_size).macs == blocks + 64 * 64 * 27 * 64 + classes


@pytest.mark.parametrize("width", [0.3, 0.58, 0.685, 1.71])
def test_filters_of_resnets_come_in_sixteens_at_every_width(width: float):
    with torch.device("meta"):
        net = create_model("resnet18-small", width=width)
    filters = [m.out_channels for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert all(n % 16 == 0 and n > 0 for n in filters)
    assert abs(filters[-1] / 512 - width) <= 8 / 512


@pytest.mark.parametrize(
    ("channels", "scheme"), [(4, "dense"), (4, "lr"), (8, "lr"), (8, "mixture(kx1, 1xk, kxk=2)")]
)
def test_the_first_filters_of_airbench_pass_their_inputs_on(channels: int, scheme: str):
    layer = lr.build_conv(channels, 8, 3, scheme, padding=1, bias=False)
    begin_as_identity_(layer)
    x = torch.randn(2, channels, 5, 5)
    torch.testing.assert_close(layer(x)[:, :channels], x)


def test_airbench_fixes_the_scales_of_norms_and_keeps_its_whitening_filters():
    net = create_model("airbench")
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [(norm.weight.requires_grad, norm.bias.requires_grad) for norm in norms] == 6 * [(False, True)]
    thinner = lr.thin(net, width=0.5, input_size=(3, 32, 32))
    assert next(m for m in thinner.modules() if isinstance(m, PatchConv2d)).weight.shape == (24, 3, 2, 2)
    assert thinner.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 10)
