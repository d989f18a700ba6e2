"""Networks of any signature: inputs and outputs get names, and every one of them is compared in every format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.request import Call, free_axes, named_tensors
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export, load

FORMATS = [".onnx", ".pt2", ".ts"]


@dataclass
class Output:
    """What a network of Hugging Face gives: a dataclass whose fields may be None."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class Classifier(nn.Module):
    """Called as a network of Hugging Face is: by keywords, with options that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        all_maps: bool = False,
    ) -> Output:
        maps = torch.relu(self.conv(pixel_values))
        maps = maps if mask is None else maps * mask
        return Output(
            logits=self.head(maps.mean((2, 3))), hidden_states=(pixel_values * 2, maps) if all_maps else None
        )


def test_inputs_are_named_by_the_parameters_of_the_forward():
    net, x, mask = Classifier(), torch.ones(2, 3, 8, 8), torch.ones(2, 1, 8, 8)
    assert Call.of(net, x).names == ("image",)
    assert Call.of(net, (x, None, mask)).names == ("pixel_values", "mask")
    swapped = Call.of(net, {"mask": mask, "pixel_values": x, "all_maps": True})
    assert swapped.names == ("pixel_values", "mask")
    assert swapped.tensors["mask"] is mask
    assert len(swapped.run(net).hidden_states) == 2
    with pytest.raises(LowRankError, match="not called with these inputs"):
        Call.of(net, {"pixels": x})
    with pytest.raises(LowRankError, match="2 inputs"):
        Call.of(net, (x, None, mask), ["a"])


def test_axes_are_free_by_their_words_or_by_number():
    call = Call.of(
        Classifier(), {"pixel_values": torch.ones(2, 3, 8, 8), "labels": torch.ones(3, dtype=torch.long)}
    )
    assert free_axes(call, ("batch", "width")) == {"pixel_values": {0: "batch", 3: "width"}, "labels": {}}
    assert free_axes(call, {"labels": {0: "n"}}) == {"pixel_values": {}, "labels": {0: "n"}}
    grown = call.sized(free_axes(call, ("batch", "width")), {"batch": 5, "width": 2})
    assert [tuple(tensor.shape) for tensor in grown.tensors.values()] == [(5, 3, 8, 16), (3,)]
    with pytest.raises(LowRankError, match="axis that labels lacks"):
        free_axes(call, {"labels": {1: "n"}})


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_takes_several_inputs_and_gives_several_outputs(suffix: str, tmp_path: Path):
    net = Classifier().eval()
    example = {"pixel_values": torch.randn(1, 3, 8, 8), "mask": torch.rand(1, 1, 8, 8), "all_maps": True}
    path = tmp_path / f"net{suffix}"
    assert export(net, path, example_input=example, dynamic=("batch", "height", "width")).error < 1e-4
    runner = open_engine(path, trusted=True)
    assert [port.name for port in runner.inputs] == ["pixel_values", "mask"]
    assert runner.inputs[1].shape == ("batch", 1, "height", "width")
    x, mask = torch.randn(3, 3, 6, 10), torch.rand(3, 1, 6, 10)
    found = runner({"mask": mask.numpy(), "pixel_values": x.numpy()})
    expected = named_tensors(net(x, mask=mask, all_maps=True))
    assert list(found) == list(expected) == ["logits", "hidden_states_0", "hidden_states_1"]
    for name, right in expected.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), right, rtol=1e-4, atol=1e-5)


def test_a_loaded_file_is_called_by_position_or_by_name_and_gives_a_dictionary(tmp_path: Path):
    net, x, mask = Classifier().eval(), torch.randn(2, 3, 8, 8), torch.rand(2, 1, 8, 8)
    names: Any = {"input_names": ["photo", "weight"], "output_names": ["scores", "a", "b"], "opset": 20}
    export(net, tmp_path / "net.onnx", example_input=(x, None, mask, {"all_maps": True}), dynamic=(), **names)
    loaded = load(tmp_path / "net.onnx")
    found = loaded(x, weight=mask)
    assert list(found) == ["scores", "a", "b"]
    torch.testing.assert_close(found["scores"], net(x, mask=mask).logits, rtol=1e-4, atol=1e-5)
    assert loaded.runner.inputs[0].shape == (2, 3, 8, 8)
    with pytest.raises(LowRankError, match="takes photo, weight"):
        loaded(x)


class SquareOnly(nn.Module):
    """Runs at any size, but a trace of it is for one width."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.shape[3])


class OneBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(2, 60) * 2


def test_what_is_not_free_is_refused_with_the_reason(tmp_path: Path):
    with pytest.raises(LowRankError, match="no free batch"):
        export(OneBatch(), tmp_path / "net.ts", example_input=torch.randn(2, 3, 4, 5))
    with pytest.raises(LowRankError, match="output of the exported network differs"):
        export(SquareOnly(), tmp_path / "net.ts", input_size=(3, 4, 4), dynamic=("width",))
    with pytest.raises(LowRankError, match=r"torch.export cannot trace OneBatch with free batch"):
        export(OneBatch(), tmp_path / "net.pt2", example_input=torch.randn(2, 3, 4, 5))
    assert not list(tmp_path.iterdir())
    assert export(OneBatch(), tmp_path / "net.pt2", example_input=torch.randn(2, 3, 4, 5), dynamic=()).error == 0


@pytest.mark.parametrize("suffix", FORMATS)
def test_bfloat16_is_kept_and_compared(suffix: str, tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).bfloat16().eval()
    assert export(net, tmp_path / f"net{suffix}", input_size=(3, 8, 8)).error <= 0.05
    if suffix == ".onnx":
        onnx = pytest.importorskip("onnx")
        graph = onnx.load(tmp_path / "net.onnx").graph
        assert {tensor.data_type for tensor in graph.initializer} == {onnx.TensorProto.BFLOAT16}
    else:
        x = torch.randn(2, 3, 8, 8).bfloat16()
        torch.testing.assert_close(load(tmp_path / f"net{suffix}", trusted=True)(x), net(x))


class NamedAsGraphs(nn.Module):
    """Parts with names of attributes that torch's own graph modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.meta, self.graph = nn.Sequential(nn.Linear(5, 4), nn.ReLU()), nn.Conv2d(3, 4, 3)
        self.code = nn.Parameter(torch.rand(4))

    def forward(self, image: Tensor, meta: Tensor) -> dict[str, Tensor]:
        return {"scores": self.graph(image).mean((2, 3)) * self.meta(meta) + self.code}


@pytest.mark.parametrize("suffix", FORMATS)
def test_parts_may_have_the_names_of_what_graphs_have(tmp_path: Path, suffix: str):
    net, example = NamedAsGraphs().eval(), (torch.randn(2, 3, 8, 8), torch.randn(2, 5))
    export(net, tmp_path / f"net{suffix}", example_input=example)
    runner = open_engine(tmp_path / f"net{suffix}", trusted=True)
    given = runner({"image": example[0].numpy(), "meta": example[1].numpy()})
    torch.testing.assert_close(torch.from_numpy(given["scores"]), net(*example)["scores"].detach())


class Keywords(nn.Module):
    """Takes its inputs by any keyword, as wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor:
        return self.conv(named["image"]) * named["scale"][:, None, None, None]


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_forward_of_any_keywords_has_a_free_batch(tmp_path: Path, suffix: str):
    net, example = Keywords().eval(), {"image": torch.randn(2, 3, 8, 8), "scale": torch.rand(2)}
    export(net, tmp_path / f"net{suffix}", example_input=example)
    runner = open_engine(tmp_path / f"net{suffix}", trusted=True)
    assert [port.name for port in runner.inputs] == ["image", "scale"]
    other = {"image": torch.randn(5, 3, 8, 8), "scale": torch.rand(5)}
    given = runner({name: tensor.numpy() for name, tensor in other.items()})
    torch.testing.assert_close(torch.from_numpy(next(iter(given.values()))), net(**other).detach())
