import copy
import threading
import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from lowrank_cnn.core.errors import LowRankError, LowRankWarning
from lowrank_cnn.core.notes import notes
from lowrank_cnn.method.convert import conversion_costs, convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.method.init import composite_sigma
from lowrank_cnn.method.layers import CompositeConv2d

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


@settings(max_examples=150)
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


def test_the_callers_network_stays_as_it_was():
    net = small()
    before, state = str(net), copy.deepcopy(net.state_dict())
    new = convert(net, "lr")
    assert str(net) == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    assert notes(net).conversion is None
    with torch.no_grad():
        new[1].weight.fill_(7)
    assert net[1].weight[0] == 1


def test_the_report_says_what_changed_and_what_stayed():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 6, 5))
    report = notes(convert(net, "lr-join")).conversion
    assert [(row.name, row.before, row.after) for row in report.changed] == [
        ("0", "3x3,8", "3x1,4 + 1x3,4 -> 1x1,8"),
        ("3", "5x5,6", "5x1,3 + 1x5,3 -> 1x1,6"),
    ]
    assert [(row.name, row.reason) for row in report.kept] == [
        ("1", "its kernel is 1x1"),
        ("2", "it is depthwise"),
    ]
    assert (report.changed[0].params_before, report.changed[0].params_after) == (224, 72 + 64 + 8)


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
    with pytest.raises(LowRankError, match=r"nothing can be converted: 0: its kernel is 1x1\."):
        convert(nn.Sequential(nn.Conv2d(3, 8, 1)), "lr")


def test_the_whole_model_may_be_one_conv():
    assert isinstance(convert(nn.Conv2d(3, 8, 3), "lr"), CompositeConv2d)


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
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 1)), "nothing can be converted: 0: its kernel is 1x1"),
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


def test_without_scheme_and_budget_it_says_what_is_missing():
    with pytest.raises(LowRankError, match="give a scheme, such as lr, or a budget"):
        convert(nn.Sequential(nn.Conv2d(8, 8, 3)))


@pytest.mark.parametrize(
    ("change", "scheme", "why"),
    [
        (convert, "lr", "channel groups"),
        (convert, "lr-join", "channel groups"),
        (convert, "channel(m=0.25)", "channel groups"),
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
        change(net, scheme)
    told = [str(one.message) for one in told if one.category is LowRankWarning]
    if why is None or scheme == "dense":
        assert told == []
    else:
        [one] = told
        assert one.startswith(f"no fused kernel runs 1 of 2 low-rank layers ({why}), which on a GPU can train")
