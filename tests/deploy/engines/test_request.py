"""Networks of any signature: inputs and outputs get names, and every one of them is compared in every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy import parity as comparing
from lowrank_cnn.deploy.engines.request import InHalf, named_tensors, request_for
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.method.convert import convert
from lowrank_cnn.models.network_file import Stored
from tests.deploy.engines.conftest import Calls

FORMATS = [".onnx", ".pt2", ".ts"]
SIZE = (3, 8, 8)


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


class Point(NamedTuple):
    x: Tensor
    y: Tensor


def test_the_tensors_of_a_result_have_names():
    one, two = torch.ones(1), torch.ones(2)
    for result, names in [
        (one, ["output"]),
        ([one, (two, None)], ["output_0", "output_1_0"]),
        ({"maps": [one, two], 3: one}, ["maps_0", "maps_1", "3"]),
        (Output(logits=one, hidden_states=(one, two)), ["logits", "hidden_states_0", "hidden_states_1"]),
        (Point(one, two), ["x", "y"]),
    ]:
        assert list(named_tensors(result)) == names
    for bad in ({"name": "net"}, None, {}, object()):
        with pytest.raises(LowRankError):
            named_tensors(bad)


def ports(request: Any, side: str) -> list[list[Any]]:
    return [[port["name"], port["shape"], port["dtype"]] for port in json.loads(request.metadata[side])]


def test_inputs_and_axes_are_named_by_the_forward_or_by_the_user():
    net, x, mask = Classifier(), torch.ones(2, *SIZE), torch.ones(2, 1, 8, 8)
    for example, options, inputs in [
        (x, {}, [["image", ["batch", 3, 8, 8], "float32"]]),
        (x.bfloat16(), {"dynamic": ()}, [["image", [2, 3, 8, 8], "bfloat16"]]),
        ((x, None, mask), {},
         [["pixel_values", ["batch", 3, 8, 8], "float32"], ["mask", ["batch", 1, 8, 8], "float32"]]),
        ({"labels": torch.ones(3, dtype=torch.long), "pixel_values": x}, {"dynamic": ("batch", "width")},
         [["pixel_values", ["batch", 3, 8, "width"], "float32"], ["labels", [3], "int64"]]),
        ({"labels": torch.ones(3), "pixel_values": x}, {"dynamic": {"labels": {0: "n"}}},
         [["pixel_values", [2, 3, 8, 8], "float32"], ["labels", ["n"], "float32"]]),
    ]:  # fmt: skip
        network = net.bfloat16() if getattr(example, "dtype", None) == torch.bfloat16 else net.float()
        assert ports(request_for(Stored(network), example, **options)[1], "inputs") == inputs


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        maps = self.conv(image)
        return {"image": maps, "scores": maps.mean((2, 3))}


def test_outputs_called_as_an_input_get_another_name_and_free_axes_have_no_length():
    given = Stored(TwoHeads().train(), SIZE)
    network, request = request_for(given)
    assert request.outputs == ("output_image", "scores")
    assert ports(request, "outputs")[1] == ["scores", [None, None], "float32"]
    assert given.network.training
    assert not network.training
    fixed = ports(request_for(given, dynamic=())[1], "outputs")
    assert fixed == [["output_image", [2, 4, 8, 8], "float32"], ["scores", [2, 4], "float32"]]


X = torch.ones(2, *SIZE)


@pytest.mark.parametrize(
    ("network", "options", "says"),
    [
        (TwoHeads(), {}, "size of the images"),
        (TwoHeads(), {"input_size": SIZE, "output_names": ["a"]}, r"gives 2 outputs \(image, scores\)"),
        (TwoHeads(), {"input_size": SIZE, "output_names": ["a", "a"]}, "as many different output_names"),
        (TwoHeads(), {"input_size": SIZE, "preprocess": True}, "trained image network"),
        (TwoHeads(), {"input_size": SIZE, "preprocess": "chw"}, "True, 'nchw' or 'nhwc', not 'chw'"),
        (Classifier(), {"example_input": {"pixels": X}}, "cannot be called with these inputs"),
        (Classifier(), {"example_input": (X, None, X), "input_names": ["a"]}, "2 inputs"),
        (Classifier(), {"example_input": (X, X), "dynamic": {"labels": {4: "n"}}}, "axis that labels lacks"),
        (nn.Conv2d(3, 4, 3).half(), {"input_size": SIZE, "precision": "fp16"}, "fp16 is for networks in float32"),
        (Classifier(), {"example_input": {"pixel_values": X}, "precision": "fp16"}, "positional inputs"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(network: nn.Module, options: Any, says: str, tmp_path: Path):
    with pytest.raises(LowRankError, match=says):
        export(network, tmp_path / "net.pt2", **options)
    assert not list(tmp_path.iterdir())


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
    with pytest.raises(LowRankError, match="batch cannot be dynamic"):
        export(OneBatch(), tmp_path / "net.ts", example_input=torch.randn(2, 3, 4, 5))
    with pytest.raises(LowRankError, match="output of the exported network differs"):
        export(SquareOnly(), tmp_path / "net.ts", input_size=(3, 4, 4), dynamic=("width",))
    with pytest.raises(LowRankError, match=r"torch.export cannot trace OneBatch with free batch"):
        export(OneBatch(), tmp_path / "net.pt2", example_input=torch.randn(2, 3, 4, 5))
    assert not list(tmp_path.iterdir())
    assert export(OneBatch(), tmp_path / "net.pt2", example_input=torch.randn(2, 3, 4, 5), dynamic=()).error == 0


def test_bfloat16_is_kept_where_the_engine_computes_in_it(tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).bfloat16().eval()
    x = torch.randn(2, 3, 8, 8).bfloat16()
    for suffix in (".pt2", ".ts"):
        export(net, tmp_path / f"net{suffix}", input_size=(3, 8, 8))
        torch.testing.assert_close(load(tmp_path / f"net{suffix}", trusted=True)(x), net(x))
    with pytest.raises(LowRankError, match=r"no convolutions in torch\.bfloat16: export model\.float\(\)"):
        export(net, tmp_path / "net.onnx", input_size=(3, 8, 8))


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


# A forward that decides by values has no file.


def written(x: Tensor) -> Tensor:
    kept = torch.zeros(2)
    kept[0] = x.mean()
    return x * int(kept[0] > 0)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "__bool__": lambda x: x if x.mean() > 9 else -x,
    "__float__": lambda x: x / float(x.std()),
    "item": lambda x: x - x.max().item(),
    "tolist": lambda x: x * x.flatten().tolist()[0],
    "equal": lambda x: x if torch.equal(x, x.flip(-1)) else -x,
    "__int__": written,
}


@pytest.mark.parametrize("name", READERS)
def test_a_forward_that_decides_by_values_is_refused(name: str, tmp_path: Path, capfd):
    """For images brighter than the example the network may take another path, which a trace does not hold."""
    with pytest.raises(LowRankError, match=f"cannot trace Calls: its forward reads values .*{name}.* the example"):
        export(Calls(READERS[name]), tmp_path / "net.ts", input_size=SIZE)
    if name == "__bool__":
        with pytest.raises(LowRankError, match=r"torch.export cannot trace Calls"):
            export(Calls(READERS[name]), tmp_path / "net.pt2", input_size=SIZE)
        assert capfd.readouterr() == ("", "")  # torch would print the graph
    assert not list(tmp_path.iterdir())


def test_sizes_and_buffers_may_be_read(tmp_path: Path):
    class Scaled(Calls):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(self.scale)

    net = Scaled(lambda x: x.view(int(x.shape[0]), -1) if x.dim() == 4 and len(x) else x)
    net.register_buffer("scale", torch.tensor(2.0))
    assert export(net, tmp_path / "net.ts", input_size=SIZE, dynamic=()).error == 0


# Half precision, between inputs and outputs in float32.


def test_a_network_in_half_takes_and_gives_float32(tiny: nn.Module):
    images = torch.randn(2, 3, 12, 12)
    half, mixed = InHalf(tiny), InHalf(tiny, lambda part: type(part) is nn.Linear)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float16}
    assert mixed.network.get_submodule("7.layer").weight.dtype == torch.float32
    for made in (half, mixed):
        assert made(images).dtype == torch.float32
        torch.testing.assert_close(made(images), tiny(images), atol=0.01, rtol=0.01)
    assert tiny[0].bias.dtype == torch.float32


GROUPED = [nn.Conv2d(24, filters, 3, padding=1, groups=groups) for groups, filters in ((2, 24), (24, 48))]


@pytest.mark.parametrize("conv", [*GROUPED, "lr-join"])
def test_groups_of_channels_are_right_in_half_precision(conv: nn.Module | str, tmp_path: Path):
    torch.manual_seed(0)
    scheme, conv = (conv, nn.Conv2d(24, 48, 3, padding=1, groups=3)) if isinstance(conv, str) else ("", conv)
    net = nn.Sequential(nn.Conv2d(3, 24, 1), nn.ReLU(), conv).eval()
    net = convert(net, scheme, where="2", allow_costlier=True).eval() if scheme else net
    assert export(net, tmp_path / "net.onnx", input_size=(3, 12, 12), precision="fp16").error < 0.02


@pytest.mark.parametrize(
    ("network", "suffix", "says"),
    [
        *((nn.LocalResponseNorm(3), suffix, "not implemented for 'Half'") for suffix in FORMATS),
        *((Calls(READERS["__bool__"]), suffix, "cannot trace Calls") for suffix in (".onnx", ".ts")),
        (Calls(lambda x: x * 1e6), ".ts", "by inf, since its values overflow in half precision: nothing was"),
    ],
)
def test_what_half_precision_lacks_is_refused_in_a_sentence(network, suffix: str, says: str, tmp_path: Path):
    """`lowrank plan --engine auto` tries every precision, and goes on with the next."""
    with pytest.raises(LowRankError, match=says):
        export(network.eval(), tmp_path / f"net{suffix}", input_size=SIZE, precision="fp16")


# A file that gives other results than its network is not written, whichever output and size it is.


def two_results(run: Callable[[Tensor], Tensor]) -> nn.Module:
    return Calls(lambda x: {"double": run(x), "largest": x.flatten(1).argmax(1)})


def compare(monkeypatch: pytest.MonkeyPatch, run, network: nn.Module, example: Tensor) -> list[int]:
    """The batches on which a file that computes `run`, a function of arrays, is compared."""
    network, request = request_for(Stored(network), example, ("batch", "width"))
    batches = []

    def opened(inputs):
        batches.append(len(inputs["image"]))
        return run(inputs["image"])

    monkeypatch.setattr(comparing, "open_engine", lambda path, trusted: opened)
    assert comparing.parity(Path("net.pt2"), request, network) < 1e-4
    return batches


def right(x):
    return {"double": 2 * x, "largest": x.reshape(len(x), -1).argmax(1)}


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (right, ""),
        (lambda x: {**right(x), "double": 2.00001 * x}, ""),
        (lambda x: {**right(x), "double": 2.1 * x}, "double of the exported network"),
        (lambda x: {**right(x), "largest": right(x)["largest"] * 0 - 1}, "largest of the exported network"),
        (lambda x: {"double": 2 * x}, "largest of the exported network"),
        (lambda x: {**right(x), "double": 2 * x * (float("nan") if len(x) == 3 else 1)}, "input of 3x1x4x4"),
        (lambda x: {**right(x), "double": 2 * x[..., :4]}, "input of 2x1x4x6"),
        (lambda x: {**right(x), "largest": right(x)["largest"].astype("float32")}, "largest of the exported"),
    ],
)
def test_every_output_is_compared_at_every_size(monkeypatch, run, says: str):
    network, example = two_results(lambda x: 2 * x), torch.randn(2, 1, 4, 4)
    if not says:
        assert {1, 2, 3} <= set(compare(monkeypatch, run, network, example))
        return
    with pytest.raises(LowRankError, match=says):
        compare(monkeypatch, run, network, example)


def test_a_network_that_takes_no_random_numbers_is_compared_on_its_example(monkeypatch):
    network = two_results(torch.log)  # NaN for random numbers

    def run(x):
        return {name: tensor.numpy() for name, tensor in network(torch.from_numpy(x)).items()}

    assert {1, 2, 3} <= set(compare(monkeypatch, run, network, torch.rand(2, 1, 4, 4) + 0.01))
