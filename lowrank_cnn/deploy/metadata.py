"""What an exported file says beside its graph: its classes, and how images are prepared.

| key          | value, as JSON                                                                     |
|--------------|------------------------------------------------------------------------------------|
| lowrank_cnn  | the version that wrote the file                                                    |
| input_size   | channels, height and width of what the network sees                                |
| classes      | the names of the outputs                                                           |
| mean, std    | per channel, in pixel values of 0 to 255                                           |
| resize       | the shorter side is first brought to this length; null where it is not             |
| crop         | then the centre of this height and width is cut out                                |
| pixels       | "nchw" or "nhwc" where the graph itself prepares images: it takes uint8            |
| image        | the size of the images in training, or empty where they differed in size           |
| held_out     | which images of its set training held out, where the set came without test images  |
| recipe       | the training recipe                                                                |
| whitening    | the tensors of ZCA whitening, where images were whitened: safetensors in base64    |
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from lowrank_cnn.models.files import Stored
from lowrank_cnn.models.rebuild import name_of
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import note
from lowrank_cnn.system.version import __version__
from lowrank_cnn.train.trained import Trained, trained_of

METADATA = ("input_size", "classes", "image", "recipe", "pixels", "held_out")


def metadata_of(stored: Stored, *, pixels: str | None = None) -> dict[str, str]:
    """All that is known of a network, for its file; `pixels` is the layout of the images it prepares itself."""
    found: dict[str, Any] = {"lowrank_cnn": __version__, "input_size": stored.input_size, "pixels": pixels}
    if (trained := trained_of(stored)) is not None:
        standardized = stored.preprocess.keys() == {"mean", "std"}
        recipe = trained.recipe.to_dict()
        if pixels and not standardized:
            recipe |= {"crop": None, "resize": None}  # the graph whitens whole images, and crops behind that
        found |= {"classes": trained.classes, "image": trained.image, "recipe": recipe}
        found |= {"resize": trained.augment.resize, "crop": trained.input_size[1:]}
        found["held_out"] = dict(trained.held_out) or None
        if standardized:
            found |= {name: tensor.tolist() for name, tensor in stored.preprocess.items()}
        elif not pixels:
            packed = tensors_to_bytes({name: tensor.contiguous() for name, tensor in stored.preprocess.items()})
            found["whitening"] = base64.b64encode(packed).decode()
    return {key: json.dumps(value) for key, value in found.items() if value is not None}


def attach_metadata(network: nn.Module, metadata: Mapping[str, str]) -> nn.Module:
    """Let a network out of a file carry what the file says of its images; a file of others says nothing."""
    said = {key: _value(metadata.get(key)) for key in METADATA}
    size = said["input_size"]
    if isinstance(size, list) and all(isinstance(side, int) for side in size):
        note(network, input_size=tuple(size))
    if said["classes"] is None or said["recipe"] is None:
        return network
    held_out = said["held_out"] if isinstance(said["held_out"], dict) else {}
    data = {**held_out, "classes": said["classes"], "image": said["image"] or []}
    card = {"recipe": said["recipe"], "data": data}
    preprocess = _as_pixels(size) if said["pixels"] else _preprocess(metadata)
    try:
        trained_of(Stored(network, None, card, preprocess))  # which attaches the card to the network
    except (ValueError, AttributeError) as error:
        raise LowRankError("the file's metadata is damaged: export the network again.") from error
    return network


class PreparedNetwork(nn.Module):
    """A network that takes uint8 images of the size it sees, and prepares them itself; scaling stays outside.

    Whitening is of whole images, so where images were whitened the crop behind it is inside too.
    """

    def __init__(self, trained: Trained, layout: str) -> None:
        super().__init__()
        self.network, self.prepare, self.layout = trained.network, trained.preprocess, layout
        self.window = trained.input_size[1:]
        note(self, name=name_of(trained.network))  # refusals speak of the user's network

    def forward(self, image: Tensor) -> Any:
        pixels = image.permute(0, 3, 1, 2) if self.layout == "nhwc" else image
        prepared = self.prepare(pixels)
        top, left = ((prepared.shape[2 + axis] - self.window[axis]) // 2 for axis in (0, 1))
        seen = prepared[:, :, top : top + self.window[0], left : left + self.window[1]]
        like = next(iter(self.network.parameters()), seen)
        return self.network(seen.to(like.dtype))


def _as_pixels(size: Any) -> dict[str, Tensor]:
    """The preparation of images for a graph that prepares them itself: none."""
    channels = size[0] if isinstance(size, list) and size and isinstance(size[0], int) else 3
    return {"mean": torch.zeros(channels), "std": torch.ones(channels)}


def _preprocess(metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors that images are prepared with."""
    try:
        if "whitening" in metadata:
            return tensors_from(base64.b64decode(_value(metadata["whitening"]), validate=True))
        return {name: torch.tensor(_value(metadata[name]), dtype=torch.float32) for name in ("mean", "std")}
    except (KeyError, TypeError, ValueError, binascii.Error, SafetensorError) as error:
        raise LowRankError("the file does not say how images are prepared: export the network again.") from error


def _value(text: str | None) -> Any:
    """A value out of JSON; None where it is absent or damaged."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
