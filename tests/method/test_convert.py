"""Networks are rewritten: which layers, by what, with a report, and refusals in a sentence."""

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

from lowrank_cnn.core.errors import LowRankError, LowRankWarning
from lowrank_cnn.core.modules import checked_size
from lowrank_cnn.core.notes import notes
from lowrank_cnn.deploy.export import export
from lowrank_cnn.method.convert import conversion_costs, convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.method.init import composite_sigma
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.method.select import stages
from lowrank_cnn.models import create_model
from lowrank_cnn.train import fit
from lowrank_cnn.train.evaluate import evaluate

SCHEMES = ["lr", "lr-join", "separable", "mixture", "mixture(kx1=3, 1xk=3, kxk=2, join)", "lr-join(m=0.5)"]


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 5, padding="same", bias=False),
    )


@st.composite
def convs(draw: st.DrawFn) -> nn.Conv2d:
    groups = draw(st.sampled_from([1, 1, 2]))
    kernel = draw(st.tuples(st.integers(2, 5), st.integers(2, 5)))
    padding = draw(st.sampled_from(["valid", "same", 0, 1, (2, 1)]))
    stride = (1, 1) if padding == "same" else draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    return nn.Conv2d(
        2 * groups,
        groups * draw(st.integers(3, 6)),
        kernel,
        stride=stride,
        padding=padding,
        dilation=draw(st.integers(1, 2)),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"])),
        dtype=torch.float64,
    )


@settings(max_examples=60)
@given(convs(), st.sampled_from(SCHEMES), st.integers(9, 13))
def test_any_conv_keeps_the_shape_it_gives(conv: nn.Conv2d, scheme: str, size: int):
    x = torch.randn(2, conv.in_channels, size, size + 1, dtype=torch.float64)
    try:
        expected = conv(x)
    except RuntimeError:
        assume(False)
    new = convert(conv, scheme, where=lambda name, conv: True, allow_costlier=True)
    out = new(x)
    assert out.shape == expected.shape
    assert out.dtype == torch.float64
    assert any("bias" in name for name, _ in new.named_parameters()) == (conv.bias is not None)


def test_costs_come_per_layer_and_in_total():
    net = small()
    new = convert(net, "lr")
    first, second, total = conversion_costs(net, new, (3, 10, 10))
    assert (first.macs_before, first.macs_after) == (8 * 27 * 100, 8 * 9 * 100)
    assert (second.params_before, second.params_after) == (12 * 8 * 25, 12 * 8 * 5)
    assert total.macs_after == count(new, (3, 10, 10)).macs == first.macs_after + second.macs_after


def test_fresh_weights_have_the_papers_variance_with_and_without_a_relu():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(64, 256, 3), nn.ReLU(), nn.Conv2d(256, 256, 3), nn.Flatten())
    new = convert(net, "lr")
    for layer, relu in ((new[0], True), (new[2], False)):
        std = torch.cat([weight.flatten() for weight in layer.weights]).std().item()
        assert std == pytest.approx(composite_sigma(layer.composite, relu=relu), rel=0.01)
        assert layer.bias.abs().max() == 0


def test_layers_that_are_not_converted_keep_their_weights():
    net = small()
    new = convert(net, "lr", where="0")
    assert torch.equal(new[3].weight, net[3].weight)
    assert new[3].weight is not net[3].weight


def test_low_rank_layers_are_not_converted_twice():
    says = r"low-rank already \(1 of its layers\), and nothing is left to convert"
    for scheme in ("lr", "lr-join", "separable"):
        with pytest.raises(LowRankError, match=says):
            convert(convert(nn.Sequential(nn.Conv2d(8, 8, 3)), scheme), "lr")


def hooked(kind: str = "forward_hook") -> nn.Conv2d:
    conv = nn.Conv2d(3, 8, 3)
    getattr(conv, f"register_{kind}")(lambda *_: None)
    return conv


def tied() -> nn.Module:
    a, b = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    b.weight = a.weight
    return nn.Sequential(a, b)


def quantised() -> nn.Module:
    from torch.ao.nn import qat
    from torch.ao.quantization import get_default_qat_qconfig

    return nn.Sequential(qat.Conv2d(3, 8, 3, qconfig=get_default_qat_qconfig()))


def locked() -> nn.Module:
    net = small()
    net.lock = threading.Lock()
    return net


def parametrised() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3)))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Linear(3, 4), "Linear has no convolutions"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 1)), r"nothing can be converted: 0: its kernel is 1x1\."),
        (lambda: nn.Conv2d(3, 8, 3).requires_grad_(False), "frozen"),
        (lambda: torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3))), "scripted"),
        (lambda: torch.compile(nn.Sequential(nn.Conv2d(3, 8, 3))), "compiled, which cannot be rewritten"),
        (lambda: nn.Sequential(nn.Conv2d(3, 1, 3)), "too few filters for the scheme lr"),
        (quantised, "0 is quantised"),
        (parametrised, "remove the parametrisation"),
        (hooked, "hooks"),
        (lambda: hooked("full_backward_pre_hook"), "hooks"),
        (tied, "shares its weight"),
        (lambda: nn.Sequential(nn.LazyConv2d(8, 3)), "run the model once"),
        (locked, r"cannot be copied: cannot pickle '_thread\.lock'"),
        (lambda: nn.Conv2d(4, 8, 3, dtype=torch.complex64), "its weights are complex"),
        (lambda: torch.randn(3), "an nn.Module, not Tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bad_models_are_refused_in_a_sentence(make, says: str):
    with pytest.raises(LowRankError, match=says):
        convert(make(), "lr")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scheme": None}, "give a scheme, such as lr, or a budget"),
        ({"scheme": "embed"}, "number of channels"),
        ({"scheme": "lrr"}, "no scheme"),
        ({"where": "features"}, "no convolution is called 'features'"),
        ({"where": 7}, "nothing can be converted"),
        ({"where": 3.5}, "where is a name or pattern"),
        ({"where": True}, "where is a name or pattern"),
        ({"where": {"0": 3}}, "where is a name or pattern"),
        ({"init": "zeros"}, "init is"),
        ({"init": None}, "init is"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options: dict, says: str):
    with pytest.raises(LowRankError, match=says):
        convert(small(), **{"scheme": "lr", **options})


@pytest.mark.parametrize(("kind", "share"), [("macs", 0.8), ("macs", 0.5), ("macs", 0.2), ("params", 0.4)])
def test_a_budget_alone_chooses_schemes_and_layers(kind: str, share: float):
    net = nn.Sequential(
        nn.Conv2d(8, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 5, padding=2), nn.Conv2d(64, 2, 3, padding=1)
    )
    new = convert(net, input_size=(8, 16, 16), **{kind: share})
    cost, dense = (getattr(count(model, (8, 16, 16)), kind) for model in (new, net))
    assert cost <= share * dense
    assert cost >= 0.5 * share * dense  # it spends what it may
    names = {change.scheme.partition("(")[0] for change in notes(new).conversion.changed}
    assert names <= {"lr", "mixture", "lr-join"}
    if kind == "macs":  # fewer strips, and a join, only where plain strips cost too much
        assert ("lr-join" in names) == (share < 0.25)


def test_channel_groups_stay_unless_they_are_named():
    net = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3, groups=2))
    new = convert(net, "lr")
    assert [type(layer) for layer in new] == [CompositeConv2d, nn.Conv2d]
    assert "channel groups, in which strips are slow" in notes(new).conversion.kept[0].reason


@pytest.mark.parametrize(
    ("change", "scheme", "why"),
    [
        (convert, "lr", "channel groups"),
        (decompose, "separable(m=4)", "channel groups"),
        (convert, "lr", "dilation"),
        (convert, "lr", "padding other than zeros"),
        (convert, "lr", None),
        (convert, "dense", "channel groups"),
    ],
)
def test_layers_that_no_fused_kernel_runs_are_told(change, scheme: str, why: str | None):
    option = {
        "channel groups": {"groups": 2},
        "dilation": {"dilation": 2},
        "padding other than zeros": {"padding": 1, "padding_mode": "reflect"},
    }.get(why or "", {})
    net = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, **option))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        change(net, scheme, where="*")
    told = [str(one.message) for one in told if one.category is LowRankWarning]
    if why is None or scheme == "dense":
        assert told == []
    else:
        [one] = told
        assert one.startswith(f"no fused kernel runs 1 of 2 low-rank layers ({why}), which on a GPU can train")


@pytest.mark.parametrize(
    ("where", "changed"),
    [
        ("features.conv1_1", ["features.conv1_1"]),
        ("features", ["features.conv1_1", "features.conv2_1", "features.conv3_1"]),
        ("*conv2*", ["features.conv2_1"]),
        (["*conv3*", "features.conv1_1"], ["features.conv1_1", "features.conv3_1"]),
        (3, ["features.conv3_1"]),
        ([3, (5, 5)], ["features.conv1_1", "features.conv2_1", "features.conv3_1"]),
        ({"features.conv1_1", 3}, ["features.conv1_1", "features.conv3_1"]),
        ((5, 5), ["features.conv1_1", "features.conv2_1"]),
        (lambda name, conv: conv.in_channels == 3, ["features.conv1_1"]),
    ],
)
def test_layers_are_selected_by_name_prefix_pattern_kernel_or_function(where, changed: list[str]):
    net = create_model("nin", width=0.1)
    assert [row.name for row in notes(convert(net, "lr", where=where)).conversion.changed] == changed


def test_layers_are_selected_by_stage():
    net = create_model("vgg11-gmp", width=0.1)
    found = stages(net, (3, 32, 32))
    assert [len(stage) for stage in found] == [1, 1, 2, 2, 2]
    assert found == stages(net)
    changed = notes(convert(net, "lr", where=found[2])).conversion.changed
    assert [row.name for row in changed] == ["features.conv3_1", "features.conv3_2"]
    with pytest.raises(LowRankError, match="size of the images"):
        stages(small())


def test_one_frozen_conv_stays_and_the_rest_is_rewritten():
    net = small()
    net[0].requires_grad_(False)
    report = notes(convert(net, "lr")).conversion
    assert [row.name for row in report.changed] == ["3"]
    assert "frozen" in report.kept[0].reason


@pytest.mark.parametrize("use", ["export", "fit", "evaluate"])
def test_a_network_that_was_loaded_in_part_is_refused_in_a_sentence(use: str, tmp_path: Path):
    """A model built on the meta device, into which a file without its last layer was loaded."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    net.load_state_dict(nn.Sequential(nn.Conv2d(3, 8, 3)).state_dict(), assign=True, strict=False)
    items = TensorDataset(torch.rand(8, 3, 8, 8), torch.arange(8) % 2)
    uses: dict[str, Any] = {
        "export": lambda: export(net, tmp_path / "net.safetensors"),
        "fit": lambda: fit(net, items, "modern", epochs=1, batch_size=4, progress=False),
        "evaluate": lambda: evaluate(net, items, progress=False),
    }
    with pytest.raises(LowRankError, match=r"3\.weight is on the meta device and has no values"):
        uses[use]()


class OwnConv(nn.Conv2d):
    """One that computes something of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class Renamed(nn.Conv2d):
    """A subclass by name alone."""


class Scaled(nn.Conv2d):
    """Computes by a method that the forward of torch's conv calls."""

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(input, 2 * weight, bias)


class Called(nn.Conv2d):
    """Computes in the call, which no trace of a forward shows."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(input)


def patched() -> nn.Conv2d:
    """A conv whose forward was replaced in place."""
    conv = nn.Conv2d(4, 8, 3)
    weight = conv.weight.detach()
    conv.forward = lambda x: nn.functional.conv2d(x, 2 * weight)  # type: ignore[method-assign]
    return conv


def test_a_subclass_by_name_alone_is_rewritten():
    conv = Renamed(4, 8, 3, padding="same").double()
    new = decompose(nn.Sequential(conv), "separable(m=40)", allow_costlier=True)
    x = torch.randn(2, 4, 15, 15, dtype=torch.float64)
    torch.testing.assert_close(new(x), conv(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("conv", [OwnConv(4, 8, 3), Scaled(4, 8, 3), Called(4, 8, 3), patched()])
def test_a_subclass_that_computes_something_else_stays(conv: nn.Conv2d):
    new = convert(nn.Sequential(conv, nn.Conv2d(8, 8, 3)), "lr")
    (kept,) = notes(new).conversion.kept
    assert (kept.name, kept.reason) == (
        "0",
        f"its class {type(conv).__name__} computes something else than nn.Conv2d",
    )


class Denoiser(nn.Module):
    """Takes an image and a number, as diffusion networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(1, 8)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        return self.conv(x) + self.scale(step[:, None])[:, :, None, None]


EXAMPLE = (torch.randn(2, 8, 6, 6), torch.ones(2))


def test_several_inputs_are_counted_with_their_batch():
    assert count(Denoiser(), EXAMPLE).macs == 2 * (8 * 8 * 9 * 36 + 8)
    assert count(Denoiser(), EXAMPLE).input == (8, 6, 6)
    assert count(Denoiser(), {"step": EXAMPLE[1], "x": EXAMPLE[0]}).macs == count(Denoiser(), EXAMPLE).macs


@pytest.mark.parametrize(
    ("net", "size", "macs"),
    [
        (nn.Conv1d(4, 6, 3, padding=1, bias=False), (4, 10), 4 * 6 * 3 * 10),
        (nn.Conv3d(2, 3, 3, padding=1, bias=False), (2, 4, 4, 4), 2 * 3 * 27 * 64),
        (nn.Linear(5, 7, bias=False), (5,), 35),
    ],
)
def test_sizes_have_any_number_of_axes(net: nn.Module, size: tuple[int, ...], macs: int):
    assert count(net, size).macs == macs
    assert count(net, torch.randn(1, *size)).macs == macs


@pytest.mark.parametrize("transform", [convert, decompose])
def test_a_budget_is_kept_for_a_network_of_several_inputs(transform):
    net = Denoiser()
    new = transform(net, "separable", macs=0.7, input_size=dict(zip(("x", "step"), EXAMPLE, strict=True)))
    assert count(new, EXAMPLE).macs <= 0.7 * count(net, EXAMPLE).macs
    assert new(*EXAMPLE).shape == (2, 8, 6, 6)


@pytest.mark.parametrize("bad", [32, "3x8x8", (), (3, 0, 8), (3, 2**21, 8), (True, 8, 8), None, {"image": 3}])
def test_bad_sizes_are_refused_in_a_sentence(bad: object):
    with pytest.raises(LowRankError, match=r"channels, height, width.*\.$"):
        checked_size(bad)


def test_a_shared_layer_stays_shared():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(4, 4, 3, padding=1)
            self.again = nn.ModuleList([self.first])
            self.order = [self.first]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.order[0](self.again[0](self.first(x)))

    new = convert(Twice(), "lr")
    assert isinstance(new.first, CompositeConv2d)
    assert new.first is new.again[0] is new.order[0]
    assert [row.name for row in notes(new).conversion.changed] == ["first"]
    assert new(torch.randn(1, 4, 6, 6)).shape == (1, 4, 6, 6)


def test_dtype_device_layout_and_mode_are_kept():
    net = small().to(torch.bfloat16).to(memory_format=torch.channels_last)
    net[0].eval()
    new = convert(net, "lr-join")
    assert isinstance(new[0], FactoredConv2d)
    assert not new[0].training
    assert not new[0].basis.training
    assert new[3].training
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
    assert new[0].basis.weights[0].is_contiguous(memory_format=torch.channels_last)
    with torch.device("meta"):
        assert all(p.is_meta for p in convert(small(), "separable").parameters())


def test_layers_around_convs_pass_through_untouched():
    net = nn.ModuleDict(
        {
            "conv": nn.Conv2d(4, 8, 3),
            "attention": nn.MultiheadAttention(8, 2),
            "up": nn.ConvTranspose2d(8, 4, 3),
            "line": nn.Conv1d(4, 4, 3),
            "volume": nn.Conv3d(4, 4, 3),
            "patches": nn.Conv2d(4, 8, 4, stride=4),
            "row": nn.Conv2d(4, 8, (1, 5)),
        }
    )
    new = convert(net, "lr")
    assert [row.name for row in notes(new).conversion.changed] == ["conv", "volume"]
    assert {row.name: row.reason for row in notes(new).conversion.kept} == {
        "up": "it is transposed: the scheme channel takes it",
        "line": "it is not two-dimensional: the scheme channel takes it",
        "patches": "it projects patches: name it to convert it",
        "row": "its kernel is 1x5",
    }
    assert [row.name for row in notes(convert(net, "lr", where="patches")).conversion.changed] == ["patches"]


def test_a_weight_that_a_hook_computes_is_copied_and_computed_anew():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    prune.l1_unstructured(net[0], "weight", 0.5)  # leaves a weight with gradients, which torch does not copy
    new = copy_with(net)
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(new(x), net(x))
    assert new[0].weight_orig is not net[0].weight_orig
    new(x).sum().backward()
    assert new[0].weight_orig.grad is not None
    assert net[0].weight_orig.grad is None
