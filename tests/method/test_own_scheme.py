"""A scheme that a program registers works wherever a scheme does."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lowrank_cnn as lr
from lowrank_cnn.core.notes import notes
from lowrank_cnn.method import schemes


class Longer(lr.Basis):
    """Strips two pixels longer than the kernel."""

    def sides(self, kernel: tuple[int, int]) -> list[tuple[tuple[int, int], int]]:
        return [((kernel[0] + 2, 1), 1), ((1, kernel[1] + 2), 1)]


@pytest.fixture
def longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "SCHEMES", dict(schemes.SCHEMES))
    monkeypatch.setattr(schemes, "_OPTIONS", dict(schemes._OPTIONS))
    lr.register_scheme(Longer("longer", to=1.0), "m")


def network() -> nn.Sequential:
    convs = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
    return nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.usefixtures("longer")
def test_an_own_scheme_is_converted_counted_fitted_trained_exported_and_reported(tmp_path: Path):
    dense, x = network().append(nn.Linear(16, 2)), torch.rand(128, 3, 8, 8)
    net = lr.convert(dense, "longer(m=0.5)", where="2")
    (change,) = notes(net).conversion.changed  # type: ignore[union-attr]
    assert change.after == "5x1,4 + 1x5,4 -> 1x1,16"
    weights = 16 * 5 * 8 + 8 * 16
    assert lr.count(dense, (3, 8, 8)).macs - lr.count(net, (3, 8, 8)).macs == (16 * 16 * 9 - weights) * 64

    with torch.no_grad():  # filters that strips can hold
        dense.get_submodule("2").weight[:, :, ::2, ::2] = 0  # type: ignore[index, operator]
    fitted = lr.decompose(dense, "longer(m=64)", where="2", allow_costlier=True)
    torch.testing.assert_close(fitted(x), dense(x), rtol=1e-4, atol=1e-5)
    assert len(notes(lr.decompose(dense, "longer", macs=0.7, input_size=(3, 8, 8))).decomposition)

    data = TensorDataset(x, torch.arange(128) % 2)
    lr.fit(net, data, epochs=1, out=tmp_path / "run", progress=False)
    net.eval()
    file = tmp_path / "net.onnx"
    lr.export(net, file, example_input=x[:1])
    torch.testing.assert_close(lr.load(file)(x[:1]), net(x[:1]), rtol=1e-4, atol=1e-5)
    lr.write_report([tmp_path / "run"], tmp_path / "report.html")
    assert "longer" in (tmp_path / "report.html").read_text()


class Plain(lr.Scheme):
    """A kind that says how it is built, and not how it fits trained filters."""

    def chain(self, kernel: tuple[int, int], filters: int, channel_groups: int) -> tuple[lr.Composite, ...]:
        return lr.Composite.of([(1, 1, filters)]), lr.Composite.of([(1, 1, filters)])


def test_a_kind_without_a_fit_is_refused_by_decompose_in_a_sentence():
    assert len(list(lr.build_conv(8, 8, 3, Plain("plain")).children())) == 2
    with pytest.raises(lr.LowRankError, match="cannot be fitted by plain"):
        lr.decompose(network(), Plain("plain"))


def test_a_name_that_is_not_known_or_not_possible_is_refused():
    with pytest.raises(lr.LowRankError, match="there is no scheme 'longer'"):
        lr.parse_scheme("longer")
    with pytest.raises(lr.LowRankError, match="letters, digits"):
        lr.register_scheme(lr.Basis("a b", (("kx1", Fraction(1)),)))
    with pytest.raises(lr.LowRankError, match="no option width"):
        lr.register_scheme(lr.Basis("wide", (("kx1", Fraction(1)),)), "width")
