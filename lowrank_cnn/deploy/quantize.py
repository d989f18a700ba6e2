"""Quantise a network to int8 after training, and report the loss of accuracy.

Weights are quantised per output channel, activations per tensor with ranges from calibration images. The engines'
own tools write the files: ONNX Runtime's for .onnx, NNCF for OpenVINO's .xml, torchao's pt2e for ExecuTorch's
.pte; LiteRT's .tflite is quantised here. Before that, each layer is quantised alone in torch, to find those that
int8 changes most: they stay in float. A network trained with `fit(..., quantize="int8")` brings the ranges of its
layers' inputs along.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import copied, difference, is_finite, unchanged
from lowrank_cnn.core.errors import LowRankError, to_caller
from lowrank_cnn.core.files import as_path
from lowrank_cnn.core.notes import notes
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.core.text import counted, si
from lowrank_cnn.data import Data, make_loader, open_data
from lowrank_cnn.data.own import in_short
from lowrank_cnn.data.types import stratified
from lowrank_cnn.deploy.engines.request import request_for
from lowrank_cnn.deploy.engines.targets import suffixes
from lowrank_cnn.deploy.export import Exported, check_place, load, placing, stored_of, write_request
from lowrank_cnn.deploy.parity import DifferentOutputError
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.train.evaluate import evaluate, held_out_images, match_classes
from lowrank_cnn.train.int8 import ROUNDED_LAYERS, rounded_by, rounding
from lowrank_cnn.train.trained import Trained, carried_by

_MOST_ERROR = 0.25
"""A layer that alone changes the network's output by more than this share stays in float."""
_TRIES = 3
"""Most layers that return to float, one by one, if too much accuracy is lost."""
_JUDGED = 2000
"""Training images that decide which layers return to float; calibration uses others."""
_COMPARED = 64
"""Images on which each layer is quantised alone."""
_BATCH = 16


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer: the error of the output with only this layer in int8, and whether it stays in float."""

    name: str
    error: float
    in_float: bool


Layers = tuple[QuantizedLayer, ...]


@dataclass(frozen=True)
class Quantized(Exported):
    """The file, its layers, and the top-1 accuracy before and after if test images were given."""

    layers: Layers
    before: float | None = None
    after: float | None = None
    images: int = 0

    def __repr__(self) -> str:
        """One line; `layers` has the error of each."""
        images = counted(self.images, "test image")
        told = "" if self.before is None else f", top-1 {self.before:.2%} before, {self.after:.2%} on {images}"
        return f"{self.path}: {si(self.bytes)}B in int8{told}; in float: {', '.join(self.in_float) or 'none'}"

    @property
    def in_float(self) -> tuple[str, ...]:
        """The layers that stay in float."""
        return tuple(layer.name for layer in self.layers if layer.in_float)

    @property
    def loss(self) -> float | None:
        """Points of top-1 accuracy lost."""
        return None if self.before is None or self.after is None else 100 * (self.before - self.after)


@unchanged()  # a forward may draw
@progress("quantize")
def quantize(
    model: nn.Module | Trained,
    calibration: Data | str | Path | Tensor | Sequence[Tensor],
    path: str | Path,
    *,
    images: int = 256,
    test: int | None = None,
    most_loss: float = 0.3,
    input_size: Sequence[int] | None = None,
    dynamic: Sequence[str] = ("batch",),
    overwrite: bool = False,
) -> Quantized:
    """Write `model` in int8 to an .onnx, .xml (OpenVINO), .tflite (LiteRT) or .pte (ExecuTorch) file.

    - `calibration`: images with labels (a `Data`, or what `open_data` takes), for a trained network: `images` of
      the training images set the ranges of activations, and the test images give the accuracy before and after.
      Or prepared images as tensors, [N, C, H, W]: then no accuracy is measured.
    - `test`: at most this many test images.
    - `most_loss`: points of accuracy that may be lost on other training images. While more are lost, the layer
      that int8 changes most returns to float, three layers at most. The test images decide nothing.
    - `dynamic`: the axes of any length, as in `export`; () writes a file for one image of one size.

    >>> head = nn.Flatten(), nn.Linear(8 * 30 * 30, 4)
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *head).eval()
    >>> quantize(net, torch.randn(8, 3, 32, 32), "net.int8.onnx").in_float  # doctest: +SKIP
    ()
    """
    path = as_path(path)
    if path.suffix not in (known := suffixes(int8=True)):
        suffix = path.suffix or "a file without suffix"
        raise LowRankError(f"int8 is written to {', '.join(known)}, not to {suffix}.")
    check_place(path, overwrite)
    trained = model if isinstance(model, Trained) else carried_by(model)
    network = merge(copy_with(trained.network if trained else model).eval())  # type: ignore[arg-type]
    step("reading images")
    data = judged = _labelled(calibration, trained)
    if data is not None:  # some training images as test images, if there are enough
        judged = data.holdout(min(_JUDGED, len(data.train) // 2), seed=1) if len(data.train) > 1 else None
    prepared = _prepared(judged or data or calibration, trained, images)
    # A network trained on the user's own batches has only its ranges.
    ranges = trained.ranges if trained else notes(model).int8_ranges  # type: ignore[arg-type]
    trained = replace(trained, network=network) if trained else None
    many = "batch" in dynamic
    stored = stored_of(trained or network, input_size or prepared.shape[1:])
    given, request = request_for(stored, prepared[: 2 if many else 1], dynamic)
    batches = tuple((part,) for part in prepared.split(_BATCH if many else 1))
    request = replace(request, precision="int8", calibration=batches, ranges=ranges)
    with placing(path, overwrite=overwrite) as aside:  # no rejected candidate ever has the file's name

        def write(layers: Layers) -> Quantized:
            step("writing and checking the file")
            kept = tuple(layer.name for layer in layers if layer.in_float)
            rest = {name: ends for name, ends in ranges.items() if name not in kept}
            with rounded_by(copy.deepcopy(given), rest) as expected:
                written = write_request(aside, replace(request, in_float=kept, ranges=rest), expected)
            return Quantized(str(path), written.bytes, written.error, layers)

        layers = sensitivities(network, prepared[:_COMPARED], trained=ranges)
        if data is None or trained is None:
            return write(layers)
        ours = trained

        def top1(data: Data, *, before: bool = False) -> float:
            step(f"accuracy on {counted(len(data.test), 'image')}")
            asked = ours if before else replace(ours, network=load(aside))
            return evaluate(asked, data, device="cpu", progress=False).top1

        if judged is None:
            written = write(layers)
        else:
            written = _within_loss(write, layers, most_loss, top1(judged, before=True), lambda: top1(judged))
        if test is not None:
            data = replace(data, test=data.test.subset(torch.arange(min(test, len(data.test)))))
        return replace(written, before=top1(data, before=True), after=top1(data), images=len(data.test))


def _within_loss(
    write: Callable[[Layers], Quantized],
    layers: Layers,
    most_loss: float,
    before: float,
    top1: Callable[[], float],
) -> Quantized:
    """Write the file, with one more layer in float while it loses too much; if all tries do, the best of them."""
    tried = []
    for _ in range(_TRIES + 1):
        try:
            written, after = write(layers), top1()
        except DifferentOutputError:
            after = -1.0
        else:
            if 100 * (before - after) <= most_loss:
                return written
        tried.append((after, layers))
        # The layer that changes the output most among those in int8 stays in float too.
        worst = max((layer for layer in layers if not layer.in_float), key=lambda layer: layer.error, default=None)
        layers = tuple(replace(layer, in_float=True) if layer is worst else layer for layer in layers)
    return write(max(tried, key=lambda pair: pair[0])[1])


@torch.no_grad()
def sensitivities(network: nn.Module, images: Tensor, *, trained: Collection[str] = ()) -> Layers:
    """Quantise each conv, composite and linear layer alone, and compare the network's output with its own.

    A layer that changes it too much stays in float, except those `trained` in int8, on which the others rely.
    """
    with unchanged(network):
        expected = network(*copied(images))
    if not isinstance(expected, Tensor):
        raise LowRankError("int8 is for networks that give one tensor.")
    found = []
    for name, layer in network.named_modules():
        if isinstance(layer, ROUNDED_LAYERS):
            step(f"rounding {name}")
            # A layer observes the range of its input where gradients are recorded.
            with unchanged(network), rounding(layer, images.device), torch.enable_grad():
                error = difference(network(*copied(images)).detach(), expected, by="norm")
            found.append(QuantizedLayer(name, error, error > _MOST_ERROR and name not in trained))
    if not found:
        raise LowRankError("int8 is for convs and linear layers, and this network has none.")
    return tuple(found)


def _labelled(calibration: Any, trained: Trained | None) -> Data | None:
    """The data set that was given; None for prepared images."""
    if isinstance(calibration, Tensor) or (isinstance(calibration, Sequence) and not isinstance(calibration, str)):
        return None
    if trained is None:
        give = to_caller("give", "give --calibrate path.py:function for")
        raise LowRankError(
            "labelled images need a trained network, which stores its preprocessing: for any other network, "
            f"{give} preprocessed images as a tensor."
        )
    data = calibration
    if not isinstance(data, Data):  # as the network was trained on it, with the test images that it has not seen
        size = {"image_size": trained.size_option, "channels": trained.channels, "progress": False}
        data = held_out_images(trained, calibration, progress=False) or open_data(calibration, **size)
    match_classes(trained, data)
    return data


def _prepared(calibration: Any, trained: Trained | None, images: int) -> Tensor:
    """Calibration images as the network takes them; images that cannot set ranges are refused."""
    if isinstance(calibration, Tensor):
        found = calibration.detach().float().cpu().clone()
    elif isinstance(calibration, Sequence):
        if not calibration or not all(isinstance(one, Tensor) for one in calibration):
            raise LowRankError(
                "calibration takes prepared images as a tensor [N, C, H, W], or a list of such tensors, for "
                f"networks of one input, not {in_short(calibration)}."
            )
        found = torch.cat([tensor.detach().float().cpu() for tensor in calibration])
    else:
        assert trained is not None
        split = calibration.train if len(calibration.train) else calibration.test
        chosen = split.subset(stratified(split.labels, images, seed=0))
        options: dict[str, Any] = {"preprocess": trained.preprocess, "augment": trained.augment, "seed": 0}
        loader = make_loader(chosen, batch_size=_BATCH, device="cpu", train=False, **options)
        found = torch.cat([batch.contiguous() for batch, _ in loader.epoch(0)])
    if found.dim() != 4 or not len(found):
        raise LowRankError(f"calibration takes images [N, C, H, W], not a tensor of shape {list(found.shape)}.")
    if not is_finite(found):
        raise LowRankError("the calibration images have NaN or infinite values.")
    if bool((found == found.flatten()[0]).all()):
        raise LowRankError("the calibration images are all one value, so they set no range: give real images.")
    return found
