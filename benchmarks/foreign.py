"""Other people's networks: every transform of the library on each of them, and how far off the result is.

    python -m benchmarks.foreign [--only resnet,unet] [--out benchmarks/results/foreign.json]

The networks come from pytorchcv, transformers, diffusers, monai and efficientnet_pytorch, small and with random
weights. Each one is counted, converted, decomposed, merged, planned, optimised and exported. A transform either
gives what the original gives (the table shows the relative error), or refuses with a sentence. All else, a raw
error or a wrong result, is a fault of ours and ends the command with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import lowrank_cnn as lr
from lowrank_cnn.system.environment import environment
from lowrank_cnn.system.text import text_table

TOLERANCE = 2e-3
"""Relative to the largest value: kernels add up in other orders, over networks of a hundred layers."""
PACKAGES = ("pytorchcv", "transformers", "diffusers", "monai", "efficientnet_pytorch")
_REFUSED, _WRONG, _RAW = "refused", "WRONG", "RAW ERROR"


@dataclass(frozen=True)
class Foreign:
    """A network of another library: how to build it, and the inputs it takes."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]


@dataclass
class Outcome:
    """What came of one network: per transform a relative error, or why there is none."""

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        return [f"{what}: {text}" for what, text in self.cells.items() if text.startswith((_WRONG, _RAW))]


def image(size: int = 64, channels: int = 3, *, rank: int = 2) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(1, channels, *[size] * rank),)


_PYTORCHCV = (
    "resnet10", "preresnet10", "seresnet10", "resnext14_16x4d", "densenet121", "darknet_tiny", "darknet53",
    "vgg11", "squeezenet_v1_1", "mobilenet_wd4", "mobilenetv2_wd4", "mobilenetv3_small_w7d20", "shufflenetv2_wd2",
    "efficientnet_b0", "dla34", "hrnet_w18_small_v1", "regnetx002", "ghostnet", "bagnet9", "xception",
    "vovnet27s", "peleenet", "res2net50_w14_s8", "selecsls42b", "repvgg_a0", "nin_cifar10", "wrn16_10_cifar10",
)  # fmt: skip


def networks() -> Iterator[Foreign]:
    """The table. A network that the installed version does not have is reported as such by `examine`."""
    for name in _PYTORCHCV:
        size = 32 if "cifar" in name else 128 if name == "xception" else 64
        yield Foreign(f"pytorchcv:{name}", lambda name=name, size=size: _pytorchcv(name, size), image(size))
    yield Foreign("efficientnet_pytorch:b0", _efficientnet, image())
    for kind, options in _TRANSFORMERS.items():
        yield Foreign(f"transformers:{kind}", lambda k=kind, o=options: _transformer(k, o), image())
    yield Foreign("diffusers:UNet2DModel", _unet2d, lambda: (torch.randn(1, 3, 32, 32), torch.tensor([10])))
    yield Foreign("diffusers:AutoencoderKL", _autoencoder, image(32))
    yield Foreign("monai:UNet", lambda: _monai("UNet", _UNET), image(32, 1))
    yield Foreign(
        "monai:SegResNet", lambda: _monai("SegResNet", {"spatial_dims": 2, "init_filters": 8}), image(32, 1)
    )
    yield Foreign("monai:UNet 3-D", lambda: _monai("UNet", _UNET | {"spatial_dims": 3}), image(16, 1, rank=3))
    yield Foreign("monai:DenseNet121", lambda: _monai("DenseNet121", _DENSENET), image(64, 1))


_UNET = {
    "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (8, 16, 32), "strides": (2, 2),
    "num_res_units": 1,
}  # fmt: skip
_SEGRESNET = {"spatial_dims": 2, "init_filters": 8}
_DENSENET = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_SMALL = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 5}
_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "ResNetForImageClassification": _SMALL | {"layer_type": "basic"},
    "RegNetForImageClassification": _SMALL | {"groups_width": 8},
    "ConvNextForImageClassification": {
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "num_stages": 2,
        "num_labels": 5,
    },
    "MobileNetV2ForImageClassification": {"depth_multiplier": 0.35, "num_labels": 5},
    "SegformerForSemanticSegmentation": {"hidden_sizes": [8, 16, 20, 32], "depths": [1, 1, 1, 1]},
}


def _pytorchcv(name: str, size: int) -> nn.Module:
    return import_module("pytorchcv.model_provider").get_model(name, pretrained=False, in_size=(size, size))


def _efficientnet() -> nn.Module:
    return import_module("efficientnet_pytorch").EfficientNet.from_name("efficientnet-b0", num_classes=5)


def _transformer(kind: str, options: dict[str, Any]) -> nn.Module:
    library = import_module("transformers")
    head = next(part for part in ("ForImageClassification", "ForSemanticSegmentation") if kind.endswith(part))
    config = getattr(library, kind.removesuffix(head) + "Config")(**options)
    return getattr(library, kind)(config)


def _unet2d() -> nn.Module:
    blocks = {"down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}
    unet = import_module("diffusers").UNet2DModel
    return unet(sample_size=32, block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, **blocks)


def _autoencoder() -> nn.Module:
    return import_module("diffusers").AutoencoderKL(block_out_channels=(16,), norm_num_groups=8, sample_size=32)


def _monai(name: str, options: dict[str, Any]) -> nn.Module:
    return getattr(import_module("monai.networks.nets"), name)(**options)


def examine(foreign: Foreign) -> Outcome:
    """Every transform on one network."""
    outcome, began = Outcome(foreign.name), time.monotonic()
    torch.manual_seed(0)
    try:
        model, inputs = foreign.build().eval(), foreign.inputs()
        with torch.no_grad():
            right = model(*inputs)
    except Exception as error:
        outcome.cells["built"] = f"not here: {_first_line(error)}"
        return outcome
    size = tuple(inputs[0].shape[1:])
    x: Any = inputs[0] if len(inputs) == 1 else inputs
    transforms: dict[str, Callable[[], str]] = {
        "counted": lambda: _counted(model, inputs, size),
        "converted": lambda: _converted(lr.convert(model, "lr"), inputs, right),
        "decomposed": lambda: _converted(
            lr.decompose(model, "separable", macs=0.7, input_size=size), inputs, right
        ),
        "merged": lambda: _off(lr.merge(model, example_input=x), inputs, right),
        "planned": lambda: _off(lr.plan(model, x, cache=False, repeats=3), inputs, right),
        "optimised": lambda: _off(lr.optimize(model, x, compile=False, cache=False, repeats=3), inputs, right),
        "exported": lambda: _exported(model, size, inputs, right),
    }
    for what, run in transforms.items():
        outcome.cells[what] = _answer(run)
    outcome.seconds = time.monotonic() - began
    return outcome


def _answer(run: Callable[[], str]) -> str:
    try:
        return run()
    except lr.LowRankError as error:
        return f"{_REFUSED}: {_first_line(error)}"
    except Exception as error:
        return f"{_RAW} {type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:160]


def _off(network: nn.Module, inputs: tuple[Any, ...], right: Any) -> str:
    with torch.no_grad():
        return _verdict(network(*inputs), right)


def _verdict(ours: Any, right: Any) -> str:
    """The largest error of any output, relative to that output; not a number is wrong."""
    worst = 0.0
    for a, b in zip(_tensors(ours), _tensors(right), strict=True):
        if a.shape != b.shape:
            return f"{_WRONG} shape {tuple(a.shape)}"
        error = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-12))
        worst = error if not error <= worst else worst
    return f"{worst:.0e}" if worst <= TOLERANCE else f"{_WRONG} by {worst:.2g}"


def _tensors(outputs: Any) -> list[Tensor]:
    values = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _counted(model: nn.Module, inputs: tuple[Any, ...], size: tuple[int, ...]) -> str:
    """Our count beside torch's own counter over a real run, convolutions and matrix products."""
    found = lr.count(model, size).macs
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    return (
        "equal"
        if 2 * found == counter.get_total_flops()
        else f"{_WRONG} {2 * found} / {counter.get_total_flops()}"
    )


def _converted(new: nn.Module, inputs: tuple[Any, ...], right: Any) -> str:
    """How many layers changed; another network by intent, whose outputs have the shapes of the original's."""
    with torch.no_grad():
        ours = new(*inputs)
    same = [a.shape == b.shape for a, b in zip(_tensors(ours), _tensors(right), strict=True)]
    conversion = lr.notes(new).conversion
    assert conversion is not None
    return f"{len(conversion.changed)} layers" if all(same) else f"{_WRONG} shapes"


def _exported(model: nn.Module, size: tuple[int, ...], inputs: tuple[Any, ...], right: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        lr.export(model, path, input_size=size)
        return _off(lr.load(path), inputs, right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names, comma-separated")
    parser.add_argument("--out", type=Path, help="where to write the record")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    outcomes = []
    for foreign in networks():
        if any(part in foreign.name for part in options.only.split(",")):
            outcomes.append(examine(foreign))
            print(f"{foreign.name} ({outcomes[-1].seconds:.0f} s): {outcomes[-1].cells}", flush=True)
    columns = list(dict.fromkeys(what for outcome in outcomes for what in outcome.cells))
    rows = [(o.name, *(o.cells.get(what, "").partition(":")[0] for what in columns)) for o in outcomes]
    print(text_table(("network", *columns), rows))
    if options.out:
        packages = {name: version(name) for name in PACKAGES}
        about = {"kind": "foreign", "environment": environment() | packages}
        options.out.write_text(json.dumps(about | {"rows": [asdict(o) for o in outcomes]}, indent=1) + "\n")
    faults = [f"{outcome.name}: {fault}" for outcome in outcomes for fault in outcome.faults]
    print(f"{len(outcomes)} networks, {len(faults)} faults", *faults, sep="\n  ")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
