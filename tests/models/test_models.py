import math

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.models import create_model, list_models

SMALL = {"width": 0.0625}


@pytest.mark.parametrize("norm", [None, "batch"])
@pytest.mark.parametrize("name", list_models())
def test_every_network_runs_forward_and_backward(name: str, norm: str | None):
    torch.manual_seed(0)
    net = create_model(name, num_classes=7, norm=norm, dropout=0.0, **SMALL)
    size = 224 if name == "vgg11" else 64
    x = torch.randn(2, 3, size, size)
    out = net.train()(x)
    outputs = out if isinstance(out, tuple) else (out,)
    assert all(o.shape == (2, 7) for o in outputs)
    sum(o.logsumexp(1).sum() for o in outputs).backward()
    free = [p for p in net.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in free)
    assert net.eval()(x).shape == (2, 7)


@pytest.mark.parametrize("name", list_models())
def test_the_configuration_builds_the_same_network(name: str):
    options = {"num_classes": 5, "in_channels": 1, "norm": "batch", "width": 0.125}
    with torch.device("meta"):
        net = create_model(name, **options)
        twin = create_model(**net.config)
    assert repr(net) == repr(twin)
    assert {k: v.shape for k, v in net.state_dict().items()} == {k: v.shape for k, v in twin.state_dict().items()}


def test_basis_and_join_have_nothing_between_them():
    net = create_model("vgg11-gmp-lr-join", **SMALL)
    names = [name for name, _ in net.features.named_children()]
    assert names[:4] == ["conv1_1", "conv1_1_relu", "pool1", "conv2_1"]
    assert isinstance(net.features.conv1_1, FactoredConv2d)
    assert [type(m) for m in net.features.conv1_1] == [CompositeConv2d, nn.Conv2d]


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("vgg11-gmp", "mixture(kx1, 1xk, kxk=2, join)"),
        ("nin", "separable(m=0.5)"),
        ("googlenet", "lr-join(m=0.5)"),
    ],
)
def test_any_family_takes_any_scheme(name: str, scheme: str):
    net = create_model(name, scheme=scheme, num_classes=4, **SMALL).eval()
    assert any(isinstance(m, FactoredConv2d) for m in net.modules())
    assert net(torch.randn(1, 3, 64, 64)).shape == (1, 4)
    assert str(net.config["scheme"]) == scheme


def test_width_scales_the_filters():
    with torch.device("meta"):
        assert create_model("vgg11-gmp", width=0.5).features.conv5_2.out_channels == 256
        assert create_model("nin", width=2.0).features.conv1_1.out_channels == 384


def test_batch_norm_leaves_the_class_maps_as_logits():
    names = [name for name, _ in create_model("nin", norm="batch").features.named_children()]
    assert names[-1] == "classes"
    assert [name for name, _ in create_model("nin").features.named_children()][-1] == "classes_relu"


def test_the_same_seed_gives_the_same_weights():
    nets = []
    for _ in range(2):
        torch.manual_seed(3)
        nets.append(create_model("nin-c3-lr", **SMALL))
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "vgg11-gmp-rl"}, "did you mean .*vgg11-gmp-lr"),
        ({"name": "resnet"}, "there is no network 'resnet'"),
        ({"name": "nin", "norm": "layer"}, "norm is None or 'batch'"),
        ({"name": "nin", "width": 0}, "width must be a number above 0"),
        ({"name": "nin", "width": float("nan")}, "width must be a number above 0"),
        ({"name": "nin", "width": 1e9}, "at most 64"),
        ({"name": "nin", "width": "a"}, "width must be a number above 0"),
        ({"name": "nin", "stride": 1.5}, "stride must be a whole number of at least 1"),
        ({"name": "nin", "dropout": "a"}, "dropout must be a number of at least 0 and below 1"),
        ({"name": "nin", "num_classes": -1}, "num_classes must be a whole number of at least 1"),
        ({"name": "nin", "scheme": "lowrank"}, "there is no scheme"),
        ({"name": "nin", "dropout": 1.5}, "dropout must be a number of at least 0 and below 1"),
        ({"name": "vgg11", "image_size": 0}, "image_size must be a whole number of at least 1"),
        ({"name": "vgg11", "image_size": "64"}, "image_size must be a whole number of at least 1"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options: dict, says: str):
    with pytest.raises(LowRankError, match=says):
        create_model(**options)


def test_a_scheme_may_be_a_dict():
    with torch.device("meta"):
        net = create_model("vgg11-gmp", scheme={"name": "lr-join", "m": 0.5})
    assert net.config["scheme"] == "lr-join(m=0.5)"


@pytest.mark.parametrize("name", list_models())
def test_the_first_loss_is_that_of_guessing(name: str):
    torch.manual_seed(0)
    net = create_model(name, num_classes=20, dropout=0.0, width=0.25).train()
    size = {"vgg11": 224}.get(name, 96)
    images, labels = torch.randn(8, 3, size, size), torch.arange(8)
    outputs = net(images)
    for logits in outputs if isinstance(outputs, tuple) else (outputs,):
        assert nn.functional.cross_entropy(logits, labels).item() == pytest.approx(math.log(20), abs=2)


@pytest.mark.parametrize("name", ["vgg11-gmp-lr", "googlenet", "nin"])
def test_the_image_size_of_other_networks_is_only_what_they_are_counted_at(name: str):
    with torch.device("meta"):
        plain, sized = create_model(name), create_model(name, image_size=64)
    assert sized.input_size == (3, 64, 64)
    assert {k: v.shape for k, v in plain.state_dict().items()} == {
        k: v.shape for k, v in sized.state_dict().items()
    }
