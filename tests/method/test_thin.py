"""Thinner networks: widths, norms and lone parameters that follow their channels."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError, LowRankWarning
from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.method import thin as thinning
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.thin import PendingLayer, resized, thin
from lowrank_cnn.models import create_model
from lowrank_cnn.models.build import dense_cost, rebuild

SIZE = (3, 32, 32)


class Residual(nn.Module):
    """A residual block, a concatenation, a depthwise conv and group norm, called by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.left, self.right = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 96, 1)
        self.depthwise = nn.Conv2d(160, 160, 3, padding=1, groups=160)
        self.group = nn.GroupNorm(32, 160)
        self.head = nn.Linear(160, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.cat([x + self.left(x), self.right(x)], dim=1)
        return self.head(self.group(self.depthwise(x)).mean((2, 3)))


def test_layers_fit_each_other_and_the_last_keeps_its_outputs():
    net = thin(Residual().eval(), width=0.5, input_size=SIZE)
    assert net.stem.out_channels == net.left.out_channels == net.norm.num_features == 32
    assert (net.right.out_channels, net.depthwise.groups, net.head.in_features) == (48, 80, 80)
    assert net(torch.randn(2, *SIZE)).shape == (2, 10)
    assert not net.training
    assert all(p.isfinite().all() and not p.is_meta for p in net.parameters())


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0, 1.5])
def test_a_share_of_the_macs_is_met_as_far_as_sixteens_allow(share: float):
    net = Residual()
    thinner = thin(net, macs=share, input_size=SIZE, multiple=8)
    assert count(thinner, SIZE).macs == pytest.approx(share * count(net, SIZE).macs, rel=0.25)
    assert thinner.left.out_channels % 8 == 0


@pytest.mark.parametrize(("width", "channels"), [(1.0, 28), (0.95, 28), (0.7, 16), (1.2, 32)])
def test_no_layer_gets_wider_by_rounding(width: float, channels: int):
    net = nn.Sequential(nn.Conv2d(3, 28, 3, padding=1), nn.ReLU(), nn.Conv2d(28, 4, 1))
    assert thin(net, width=width, input_size=SIZE)[0].out_channels == channels


def test_a_layer_used_twice_stays_one_layer():
    conv = nn.Conv2d(32, 32, 3, padding=1)
    net = nn.Sequential(nn.Conv2d(3, 32, 1), conv, nn.ReLU(), conv, nn.Flatten(), nn.Linear(32 * 64, 4))
    thinner = thin(net, width=0.5, input_size=(3, 8, 8))
    assert thinner[1] is thinner[3]
    assert thinner(torch.randn(1, 3, 8, 8)).shape == (1, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either a width or a share"),
        ({"width": 0.5, "macs": 0.5}, "either a width or a share"),
        ({"width": 0}, "width must be a number above 0"),
        ({"macs": float("nan")}, "macs must be a number above 0"),
        ({"width": "half"}, "width must be a number above 0"),
    ],
)
def test_bad_shares_get_one_sentence(options: dict, words: str):
    with pytest.raises(LowRankError, match=words):
        thin(Residual(), **options, input_size=SIZE)


class Fixed(nn.Module):
    """A forward with a width of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 64, 3, padding=1), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).mean((2, 3)).view(1, 64))


def test_some_layers_have_widths_of_their_own():
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1)))
    net.append(nn.Conv2d(64, 10, 1))
    made = thin(net, width=0.5, input_size=SIZE, layers={"2": 1.0, "2.1": 2.0})
    assert [made[0].out_channels, *(conv.out_channels for conv in made[2])] == [32, 64, 128]
    half = thin(net, macs=0.5, input_size=SIZE, multiple=1, layers={"2.0": 1.0})
    assert half[2][0].out_channels == 64
    assert count(half, SIZE).macs == pytest.approx(0.5 * count(net, SIZE).macs, rel=0.05)
    for layers, words in (({"3.conv": 1.0}, "no layer '3.conv'"), ({"2": 0}, "width of 2 must be a number above")):
        with pytest.raises(LowRankError, match=words):
            thin(net, width=0.5, input_size=SIZE, layers=layers)


class Scaled(nn.Module):
    """A transposed conv, several outputs, parameters and buffers that no `reset_parameters` sets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("running_total", torch.tensor(5.0))
        self.register_buffer("steps", torch.tensor([3, 4]))
        self.stem, self.up = nn.Conv2d(3, 32, 3, padding=1), nn.ConvTranspose2d(32, 32, 2, stride=2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(32, 32, 3))
        self.aux, self.head = nn.Conv2d(32, 32, 1), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.relu(self.stem(x)) * self.scale
        return {"aux": self.aux(self.up(x)), "out": self.head(x.mean((2, 3)))}


@pytest.fixture
def uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
def test_nothing_is_left_uninitialised():
    net = Scaled()
    made = thin(net, width=0.5, input_size=SIZE)
    state = made.state_dict()
    assert all(tensor.isfinite().all() for tensor in state.values())
    kept = ["scale", "running_total", "steps", *(name for name in state if name.startswith("normed.par"))]
    assert all(torch.equal(state[name], net.state_dict()[name]) for name in kept)


def test_every_output_keeps_its_shape_and_transposed_convs_get_thinner():
    net = Scaled().eval()
    made = thin(net, width=0.5, input_size=SIZE)
    x = torch.randn(2, *SIZE)
    assert {name: out.shape for name, out in made(x).items()} == {name: out.shape for name, out in net(x).items()}
    assert (made.up.in_channels, made.up.out_channels, made.aux.in_channels) == (16, 16, 16)


def test_dtypes_and_modes_are_those_of_the_network():
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Flatten(), nn.Linear(32 * 900, 4)).bfloat16()
    net[1].float().eval()  # bf16 convs with norms in float32
    made = thin(net, width=0.5, input_size=SIZE)
    assert [p.dtype for p in made.parameters()] == [p.dtype for p in net.parameters()]
    assert [m.training for m in made.modules()] == [m.training for m in net.modules()]


def test_layers_that_share_a_parameter_go_on_sharing_it():
    net = nn.Sequential(nn.Conv2d(32, 32, 3), nn.Conv2d(32, 32, 3, dilation=2), nn.Flatten(), nn.Linear(32, 4))
    net[1].weight = net[0].weight
    head = nn.Sequential(nn.Conv2d(3, 32, 1), net)
    made = thin(head, width=0.5, input_size=(3, 7, 7))[1]
    assert made[1].weight is made[0].weight
    assert made[0].weight.shape == (16, 16, 3, 3)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (nn.Sequential(nn.LazyConv2d(8, 3)), "0 is lazy: run the model once"),
        (nn.Sequential(torch.jit.script(nn.Conv2d(3, 8, 3))), "0 is scripted"),
        (
            convert(nn.Sequential(nn.Conv2d(3, 16, 3)), "lr"),
            "thin takes dense networks, and 0 is low-rank: thin first",
        ),
        (Fixed(), "expects fixed widths"),
    ],
)
def test_networks_without_layers_to_replace_are_refused(net: nn.Module, words: str):
    with pytest.raises(LowRankError, match=words):
        thin(net, width=0.5, input_size=SIZE)


def test_a_network_without_memory_gets_thinner_without_memory():
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 4, 1))
    new = thin(net, width=0.5, input_size=(3, 8, 8))
    assert {parameter.device.type for parameter in new.parameters()} == {"meta"}
    assert new[0].out_channels == 16


class ReadsLayers(nn.Module):
    """A forward that calls layers by keyword and looks at their options, or at their weights."""

    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.up, self.weights = nn.ConvTranspose2d(32, 4, 2, stride=2), weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side, step = x.shape[2], self.up.stride[0]
        maps = self.first(input=x)
        maps = nn.functional.conv2d(maps, self.second.weight, padding=1) if self.weights else self.second(maps)
        return self.up(maps, output_size=[step * side, step * side])


def test_a_forward_may_look_at_its_layers():
    net = thin(ReadsLayers(weights=False), width=0.5, input_size=SIZE)
    assert net.second.out_channels == 16
    assert net(torch.randn(2, *SIZE)).shape == (2, 4, 64, 64)


def test_a_refusal_names_classes_of_the_network_alone():
    with pytest.raises(LowRankError, match="reads the weight of a Conv2d that has not run"):
        thin(ReadsLayers(weights=True), width=0.5, input_size=SIZE)


def test_the_memory_format_stays():
    last = torch.channels_last
    net = thin(Residual().to(memory_format=last), width=0.5, input_size=SIZE)
    assert net.left.weight.is_contiguous(memory_format=last)
    assert not net.left.weight.is_contiguous()
    assert thin(Residual(), width=0.5, input_size=SIZE).left.weight.is_contiguous()


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]


@pytest.mark.parametrize("register", [*HOOKS, "register_full_backward_pre_hook"])
@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_hooks_are_kept(register: str, place: int):
    norms = nn.BatchNorm2d(32), nn.GroupNorm(4, 32)
    net = nn.Sequential(nn.Conv2d(3, 32, 3), *norms, nn.Flatten(), nn.Linear(32, 4))
    called = []
    getattr(net[place], register)(lambda module, *_: called.append(module))
    thinner = thin(net, width=0.5, input_size=(3, 3, 3))
    called.clear()
    thinner(torch.randn(2, 3, 3, 3, requires_grad=True)).sum().backward()
    assert called == [thinner[place]]


class Watched(nn.Module):
    """A network whose method is a hook of one of its layers, and changes what the next one receives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3), nn.Conv2d(64, 4, 3)
        self.first.register_forward_hook(self.doubled)
        self.seen = 0

    def doubled(self, _module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return torch.cat([output, -output], dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_hook_that_is_a_method_belongs_to_the_thinner_network():
    net = Watched()
    thinner = thin(net, width=0.5, input_size=SIZE)
    seen, net.seen = thinner.seen, 0
    thinner(torch.randn(1, *SIZE))
    assert (thinner.second.in_channels, thinner.seen, net.seen) == (32, seen + 1, 0)


@dataclass
class Found:
    logits: torch.Tensor
    maps: torch.Tensor


class Detector(nn.Module):
    """Takes an image and a mask, and gives a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mask = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(1, 32, 3, padding=1)
        self.maps, self.head = nn.Conv2d(64, 32, 3, padding=1), nn.Linear(32, 16)

    def forward(self, image: torch.Tensor, mask: torch.Tensor) -> Found:
        maps = self.maps(torch.cat([self.body(image), self.mask(mask)], 1).relu())
        return Found(self.head(maps.relu().mean((2, 3))), maps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_networks_of_several_inputs_keep_the_outputs_of_a_dataclass(dtype: torch.dtype):
    net, example = (
        Detector().to(dtype),
        (torch.randn(2, 3, 8, 8, dtype=dtype), torch.ones(2, 1, 8, 8, dtype=dtype)),
    )
    for options in ({"width": 0.5}, {"macs": 0.5}):
        made = thin(net, input_size=example, **options)
        assert (made.body.out_channels, made.maps.out_channels, made.head.out_features) == (16, 32, 16)
        assert made(*example).maps.shape == net(*example).maps.shape
    by_name = dict(zip(("image", "mask"), example, strict=True))
    assert thin(net, width=0.5, input_size=by_name).body.out_channels == 16


def test_instance_norms_and_slopes_follow_their_channels():
    norm = nn.InstanceNorm2d(32, affine=True, track_running_stats=True)
    net = nn.Sequential(nn.Conv2d(3, 32, 3), norm, nn.PReLU(32, 0.1), nn.Conv2d(32, 8, 3), nn.PReLU())
    new = thin(net, width=0.5, input_size=(3, 12, 12))
    assert isinstance(new, nn.Sequential)
    assert [tuple(part.weight.shape) for part in new] == [(16, 3, 3, 3), (16,), (16,), (8, 16, 3, 3), (1,)]
    torch.testing.assert_close(new[2].weight, torch.full((16,), 0.1))
    assert bool(new(torch.randn(2, 3, 12, 12)).isfinite().all())


def test_a_width_that_narrow_layers_cannot_have_is_told():
    """Sixteen channels in multiples of sixteen stay sixteen: such a rival of low-rank networks is not thin."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.LazyLinear(2))
    net(torch.zeros(1, 3, 8, 8))
    with pytest.warns(LowRankWarning, match=r"asked for 0.50 of the MACs, and comes to 1.00, in multiples of 16"):
        thin(net, macs=0.5, input_size=(3, 8, 8))
    with pytest.warns(LowRankWarning, match="makes no layer thinner"):
        thin(net, width=0.5, input_size=(3, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        thin(net, macs=0.5, input_size=(3, 8, 8), multiple=1)


def test_each_rounded_network_is_built_once(monkeypatch: pytest.MonkeyPatch):
    """Fourteen steps of bisection give eight widths here: larger networks took minutes."""
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 96, 3), nn.ReLU(), nn.Conv2d(96, 4, 1))
    built, at = [], thinning._Thinning.at
    monkeypatch.setattr(thinning._Thinning, "at", lambda self, width: built.append(new := at(self, width)) or new)
    thinner = thin(net, macs=0.4, input_size=(3, 12, 12), multiple=16)
    widths = [(one[0].out_channels, one[2].out_channels) for one in built]
    assert len(widths) == len(set(widths)) < 10
    assert (thinner[0].out_channels, thinner[2].out_channels) == (32, 64)


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of maps, which come second."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        maps = input.permute(0, 2, 3, 1)
        maps = nn.functional.layer_norm(maps, self.normalized_shape, self.weight, self.bias, self.eps)
        return maps.permute(0, 3, 1, 2)


class ScaledBranch(nn.Module):
    """A residual branch as in ConvNeXt: layer norm, and a scale of every channel that belongs to no layer."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 64, 4, 4), ChannelNorm(64)
        self.deep = nn.Conv2d(64, 64, 7, padding=3, groups=64)
        self.norm, self.wide, self.back = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.scale = nn.Parameter(torch.full((64,) if flat else (64, 1, 1), 0.25))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.stem(x))
        y = self.back(nn.functional.gelu(self.wide(self.norm(self.deep(x).permute(0, 2, 3, 1))))).permute(
            0, 3, 1, 2
        )
        scale = self.scale.reshape(1, -1, 1, 1) if self.scale.dim() == 1 else self.scale
        return self.head((x + y.mul(scale)).mean((2, 3)))


@pytest.mark.parametrize("flat", [True, False])
def test_layer_norms_and_scales_follow_their_channels(flat: bool):
    net = ScaledBranch(flat)
    new = thin(net, width=0.5, input_size=SIZE)
    assert new.scale.shape == ((32,) if flat else (32, 1, 1))
    assert torch.equal(new.scale, torch.full_like(new.scale, 0.25))
    assert new.norm.normalized_shape == new.first.normalized_shape == (32,)
    assert torch.equal(new.norm.weight, torch.ones(32))
    assert new(torch.randn(2, *SIZE)).shape == (2, 10)
    assert net.scale.numel() == 64


def test_a_scale_of_different_values_has_no_thinner_form():
    net = ScaledBranch(flat=True)
    with torch.no_grad():
        net.scale.uniform_()
    with pytest.raises(LowRankError, match="nothing initialises scale in its new shape"):
        thin(net, width=0.5, input_size=SIZE)


MAPS = torch.randn(2, 12, 9, 9)


def halved(channels: int) -> int:
    return channels // 2


@pytest.mark.parametrize(
    ("layer", "leaving"),
    [
        (nn.Conv2d(24, 16, 3, stride=2, padding=1, bias=False), 8),
        (nn.Conv2d(24, 16, (3, 1), dilation=2, padding_mode="circular", padding=2), 8),
        (nn.Conv2d(24, 16, 3, groups=8), 8),
        (nn.Conv2d(24, 48, 3, groups=24), 24),  # depthwise: two filters for each channel that arrives
        (nn.ConvTranspose2d(24, 16, 3, stride=2, output_padding=1), 8),
        (nn.BatchNorm2d(24, momentum=0.3), 12),
        (nn.GroupNorm(8, 24), 12),
        (nn.InstanceNorm2d(24, momentum=0.3, affine=True, track_running_stats=True), 12),
        (nn.PReLU(24), 12),
        (nn.PReLU(), 12),
    ],
)
def test_only_channels_and_groups_change(layer: nn.Module, leaving: int):
    new = resized(layer, MAPS, halved)
    before, after = layer(torch.randn(2, 24, 9, 9)), new(MAPS)
    assert after.shape == (before.shape[0], leaving, *before.shape[2:])
    assert {*dict(new.named_parameters())} == {*dict(layer.named_parameters())}
    options = ("kernel_size", "stride", "padding", "dilation", "padding_mode", "output_padding", "momentum", "eps")
    assert all(getattr(new, name, None) == getattr(layer, name, None) for name in options)


def test_a_layer_that_waits_for_its_input_may_be_copied():
    waiting = PendingLayer(nn.Conv2d(24, 16, 3, stride=2), halved)
    assert copy.deepcopy(waiting).kernel_size == (3, 3)
    with pytest.raises(AttributeError, match="'Conv2d' object has no attribute 'depth'"):
        _ = waiting.depth


@pytest.mark.parametrize(
    ("make", "scheme"),
    [(lambda: create_model("nin", width=0.1, norm="batch"), None), (Residual, "lr")],
    ids=["ours", "not ours"],
)
def test_a_thinner_network_is_loaded_again_from_its_file(make, scheme: str | None, tmp_path):
    dense = make().eval()
    net = thin(thin(dense, width=0.8, input_size=SIZE, multiple=8), width=0.8, input_size=SIZE, multiple=8)
    net = convert(net, scheme) if scheme else net
    path = export(net, tmp_path / "net.safetensors", input_size=SIZE).path
    x = torch.randn(2, *SIZE)
    for into in (dense, make(), net) if isinstance(dense, Residual) else (None,):
        assert load(path, into=into).eval()(x).equal(net.eval()(x))
    macs, params = count(dense, SIZE).macs, count(dense, SIZE).params
    assert dense_cost(net, SIZE) == (macs, params)


def test_a_network_thinned_on_an_example_is_loaded_into_itself(tmp_path):
    dense = Residual()
    net = thin(dense, width=0.5, input_size=torch.randn(1, *SIZE))
    path = export(net, tmp_path / "net.safetensors", input_size=SIZE).path
    assert load(path, into=net).stem.out_channels == 32
    with pytest.raises(LowRankError, match="pass the thinner network itself"):
        load(path, into=dense)


@pytest.mark.parametrize("stored", [[], {"channels": 3}, {"channels": {"stem": "many"}}, {"channels": {}}])
def test_a_damaged_description_is_refused(stored: object):
    with pytest.raises(LowRankError, match="lists the channels"):
        rebuild({"thinning": stored}, into=Residual())
