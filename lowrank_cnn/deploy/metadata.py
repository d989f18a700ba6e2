"""Metadata of exported files: the classes, and how images are prepared.

| key          | value, as JSON                                                                     |
|--------------|------------------------------------------------------------------------------------|
| lowrank_cnn  | the version that wrote the file                                                    |
| input_size   | channels, height and width of what the network sees                                |
| classes      | the names of the outputs                                                           |
| mean, std    | per channel, in pixel values of 0 to 255                                           |
| resize       | the shorter side is first brought to this length; null if it is not                |
| crop         | then the centre of this height and width is cut out                                |
| pixels       | "nchw" or "nhwc" if the graph itself prepares images: it takes uint8               |
| image        | the size of the images in training, or empty if they differed in size              |
| held_out     | which images of its set training held out, if the set came without test images     |
| recipe       | the training recipe                                                                |
| whitening    | the tensors of ZCA whitening, if images were whitened: safetensors in base64       |
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from lowrank_cnn.core import __version__
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import TrainingCard, note
from lowrank_cnn.models.network_file import Stored
from lowrank_cnn.train.trained import trained_of

_READ = ("input_size", "classes", "image", "recipe", "pixels", "held_out", "whitening", "mean", "std")


def metadata_of(stored: Stored, *, pixels: str | None = None) -> dict[str, str]:
    """The metadata of a network for its file; `pixels` is the layout of the images that the graph preprocesses."""
    found: dict[str, Any] = {"lowrank_cnn": __version__, "input_size": stored.input_size, "pixels": pixels}
    if stored.card and (trained := trained_of(stored)):
        standardized = stored.card.preprocess.keys() == {"mean", "std"}
        recipe = trained.recipe.to_dict()
        if pixels and not standardized:
            recipe |= {"crop": None, "resize": None}  # the graph whitens whole images, then crops
        found |= {"classes": trained.classes, "image": trained.image, "recipe": recipe}
        found |= {"resize": trained.augment.resize, "crop": trained.input_size[1:]}
        found["held_out"] = dict(trained.held_out) or None
        if standardized:
            found |= {name: tensor.tolist() for name, tensor in stored.card.preprocess.items()}
        elif not pixels:
            packed = save({name: tensor.contiguous() for name, tensor in stored.card.preprocess.items()})
            found["whitening"] = base64.b64encode(packed).decode()
    return {key: json.dumps(value) for key, value in found.items() if value is not None}


def attach_metadata(network: nn.Module, metadata: Mapping[str, str]) -> nn.Module:
    """Attach the metadata of a file to the network read from it. Files of other programs have none."""
    if "lowrank_cnn" not in metadata:
        return network
    try:
        said = {key: json.loads(metadata[key]) for key in _READ if key in metadata}
        if "input_size" in said:
            note(network, input_size=tuple(said["input_size"]))
        if "classes" in said and "recipe" in said:
            data = {**said.get("held_out", {}), "classes": said["classes"], "image": said["image"]}
            card = TrainingCard({"recipe": said["recipe"], "data": data}, _preprocess(said))
            trained_of(Stored(network, None, card))  # this attaches the card to the network
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, SafetensorError) as error:
        raise LowRankError("the file's metadata is damaged: export the network again.") from error
    return network


def _preprocess(said: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of preprocessing; none if the graph preprocesses images itself."""
    if "pixels" in said:
        channels = said["input_size"][0]
        return {"mean": torch.zeros(channels), "std": torch.ones(channels)}
    if "whitening" in said:
        return load(base64.b64decode(said["whitening"], validate=True))
    return {name: torch.tensor(said[name], dtype=torch.float32) for name in ("mean", "std")}
