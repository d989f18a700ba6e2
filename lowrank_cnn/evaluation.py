"""How good a trained network is, and what it says about an image; reading a checkpoint runs no code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_cnn.data import Augment, Data, Preprocess, make_loader, open_data, preprocess_from_dict
from lowrank_cnn.data.augment import centre_crop, resize_shorter
from lowrank_cnn.data.decode import BadImageError, decode_image, stack
from lowrank_cnn.data.streamed import frame
from lowrank_cnn.errors import LowRankError
from lowrank_cnn.models import create_model
from lowrank_cnn.models.pretrained import read_pretrained
from lowrank_cnn.rebuild import entry_description, rebuild
from lowrank_cnn.train.checkpoint import Checkpoint, Store, read_checkpoint
from lowrank_cnn.train.inputs import augmentation, evaluation_batch, input_size, preprocessing
from lowrank_cnn.train.launch import resolve_device
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.score import Evaluation, check_fits, score

__all__ = ["Evaluation", "Trained", "evaluate", "load_checkpoint", "load_pretrained", "predict"]


@dataclass(frozen=True)
class Trained:
    """A network with what it takes to use it: how images are prepared, and what its outputs are called.

    `image` is the size of the images it was trained on (channels, height, width) before any crop, or empty
    where they differed in size.
    """

    network: nn.Module
    preprocess: Preprocess
    recipe: Recipe
    classes: tuple[str, ...]
    image: tuple[int, ...] = ()

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour."""
        return self.image[0] if self.image else len(self.preprocess.to_dict()["mean"])

    @property
    def square(self) -> int | None:
        """The side of its images, where all were one square."""
        return self.image[1] if self.image and self.image[1] == self.image[2] else None

    @property
    def input_size(self) -> tuple[int, int, int]:
        """What the network sees of an image (channels, height, width)."""
        return self.channels, *frame(self.image[1:] or None, self.augment, train=False, fill=()).window  # type: ignore[arg-type]

    @property
    def augment(self) -> Augment:
        """How an image becomes what the network sees; where it met many sizes, every image is scaled."""
        augment = augmentation(self.recipe)
        return augment if self.image else augment.for_any_size()


def load_checkpoint(path: str | Path, *, best: bool = False, network: nn.Module | None = None) -> Trained:
    """The trained network of a run: its directory (the last weights, or the best), or one checkpoint file.

    The network is built anew from its name and options, and converted as it was; one that `create_model` does
    not know is passed in, as it was before any conversion, or converted. Where the run kept a moving average of
    the weights, that is what is loaded.
    """
    checkpoint = _read(Path(path), best)
    state = checkpoint.state
    network = rebuild(entry_description(state["model"]), into=network)
    weights = checkpoint.part("average") or checkpoint.part("model")
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise LowRankError(f"the weights in {path} are not those of {state['model']['name']}.") from error
    return Trained(
        network,
        preprocess_from_dict(checkpoint.part("preprocess")),
        Recipe.from_dict(state["recipe"]),
        tuple(state["data"]["classes"]),
        tuple(state["data"]["image"]),
    )


def load_pretrained(name: str, data: str) -> Trained:
    """A network with the weights that come with the package, and how its images are prepared."""
    found = read_pretrained(name, data)
    return Trained(
        create_model(name, pretrained=data),
        preprocess_from_dict(found.preprocess),
        Recipe.from_dict(found.card["recipe"]),
        tuple(found.card["data"]["classes"]),
        tuple(found.card["data"]["image"]),
    )


def evaluate(
    model: Trained | nn.Module | str | Path,
    data: Data | str | Path,
    *,
    preprocess: Preprocess | None = None,
    recipe: Recipe | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    workers: int = 0,
) -> Evaluation:
    """Top-1, top-5 and loss on the test images, one centre crop per image, in full precision.

    `model` is a network, what `load_checkpoint` gives, or the path of a run. A bare network takes the
    preprocessing given, or else one fitted to `data.train` as the recipe says.
    """
    data = data if isinstance(data, Data) else open_data(data)
    trained = model if isinstance(model, Trained) else _trained(model, data, preprocess, recipe)
    _check_classes(trained, data)
    _check_size(trained, data)
    place = torch.device(resolve_device(device))
    network = trained.network.to(place)
    check_fits(network, input_size(data.test, trained.augment), len(data.classes), place)
    loader = make_loader(
        data.test,
        batch_size=batch_size or evaluation_batch(data.test, trained.augment),
        preprocess=trained.preprocess,
        augment=trained.augment,
        seed=0,
        device=place,
        train=False,
        workers=workers,
    )
    return score(network, loader.epoch(0), device=place)


@torch.no_grad()
def predict(
    model: Trained | str | Path, images: Sequence[str | Path], *, top: int = 5, device: str = "auto"
) -> list[list[tuple[str, float]]]:
    """For each image file the likeliest classes with their probabilities, the likeliest first."""
    if top < 1:
        raise LowRankError(f"top is the number of classes to name, at least 1, not {top}.")
    trained = model if isinstance(model, Trained) else load_checkpoint(model)
    place = torch.device(resolve_device(device))
    network = trained.network.to(place).eval()
    preprocess = trained.preprocess.to(place)
    answers = []
    for path in images:
        pixels = _read_image(Path(path), trained).to(place)
        seen = _whole_to_window(preprocess(pixels[None]), trained)
        answers.append(_ranked(network(seen).softmax(1)[0], trained.classes, top))
    return answers


def _read(path: Path, best: bool) -> Checkpoint:
    if not path.is_dir():
        if path.suffix not in ("", ".json", ".safetensors") or not path.with_suffix(".json").is_file():
            raise LowRankError(f"{path} is neither a run's directory nor one of its checkpoints.")
        return read_checkpoint(path.with_suffix(""))
    passed_over: list[str] = []
    checkpoint = Store(path).latest(passed_over.append, kind="best" if best else "step")
    if checkpoint is None:
        raise LowRankError(f"{path} holds no checkpoint.")
    if passed_over:
        raise LowRankError(f"{passed_over[0]} To use an older state of the run, name its file in {path}.")
    return checkpoint


def _trained(
    model: nn.Module | str | Path, data: Data, preprocess: Preprocess | None, recipe: Recipe | None
) -> Trained:
    if not isinstance(model, nn.Module):
        return load_checkpoint(model)
    recipe = recipe or Recipe()
    return Trained(
        model, preprocess or preprocessing(data.train, recipe), recipe, data.classes, data.test.size or ()
    )


def _check_classes(trained: Trained, data: Data) -> None:
    """Equal names mean equal outputs; a network for other classes would only be counted wrong."""
    if trained.classes != data.classes:
        raise LowRankError(
            f"the network knows {len(trained.classes)} classes ({_some(trained.classes)}), "
            f"{data.name} has {len(data.classes)} others ({_some(data.classes)})."
        )


def _check_size(trained: Trained, data: Data) -> None:
    """The same thing at another scale is another thing to a network."""
    if trained.image and data.test.size != trained.image:
        theirs = "x".join(map(str, data.test.size)) if data.test.size else "varying size"
        how = (
            f": open the data with image_size={trained.square} (--image-size {trained.square})"
            if trained.square
            else ""
        )
        raise LowRankError(
            f"the network was trained on images of {'x'.join(map(str, trained.image))}, "
            f"{data.name} has images of {theirs}{how}."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _read_image(path: Path, trained: Trained) -> Tensor:
    """Pixels [C, H, W]: whole at the one size of the training images, else framed as these were."""
    size = (trained.image[1], trained.image[2]) if trained.image else None
    framing = frame(size, Augment() if size else trained.augment, train=False, fill=())
    try:
        image = decode_image(path.read_bytes(), channels=trained.channels, at_least=framing.at_least)
    except OSError as error:
        raise LowRankError(f"{path} cannot be read ({error.strerror}).") from error
    except BadImageError as error:
        raise LowRankError(f"{path} is not an image that can be used: {error}.") from error
    image = framing(image, None)
    return stack([image.tobytes()], image.height, image.width, trained.channels)[0].permute(2, 0, 1)


def _whole_to_window(images: Tensor, trained: Trained) -> Tensor:
    """Scale and crop what was read whole: whitening wants it so."""
    if not trained.image:
        return images
    window = trained.augment.window(images.shape[2], images.shape[3], train=False)
    return centre_crop(resize_shorter(images, trained.augment.resize), window)


def _ranked(probabilities: Tensor, classes: Sequence[str], top: int) -> list[tuple[str, float]]:
    values, indices = probabilities.topk(min(top, len(classes)))
    return [(classes[int(index)], float(value)) for value, index in zip(values, indices, strict=True)]
