"""How good a trained network is, and what it says about an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_cnn.data import Augment, Data, Preprocess, make_loader, open_data
from lowrank_cnn.data.augment import centre_crop, resize_shorter
from lowrank_cnn.data.images.decode import BadImageError, decode_image, stack
from lowrank_cnn.data.stream.streamed import frame
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.train.checkpoint import DamagedCheckpointError, Store, read_state
from lowrank_cnn.train.inputs import evaluation_batch, input_size, preprocessing
from lowrank_cnn.train.launch import resolve_device
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.score import Evaluation, check_fits, score
from lowrank_cnn.train.state import Position
from lowrank_cnn.train.trained import Trained, carried_by, load_checkpoint, load_pretrained

__all__ = ["Evaluation", "Trained", "evaluate", "load_checkpoint", "load_pretrained", "predict"]


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

    `model` is a network, what `load_checkpoint` gives, or the path of what it reads. A network that was loaded or
    trained carries how its images are prepared. Any other takes the preprocessing given, or one fitted to
    `data.train` as the recipe says.
    """
    data = data if isinstance(data, Data) else open_data(data)
    trained = model if isinstance(model, Trained) else _trained(model, data, preprocess, recipe)
    check_classes(trained, data)
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
    model: Trained | nn.Module | str | Path,
    images: Sequence[str | Path] | str | Path,
    *,
    top: int = 5,
    device: str = "auto",
) -> list[list[tuple[str, float]]]:
    """For each image file the likeliest classes with their probabilities, the likeliest first."""
    if not isinstance(top, int) or top < 1:
        raise LowRankError(f"top is the number of classes to name, at least 1, not {top!r}.")
    trained = _ready_to_ask(model)
    images = [images] if isinstance(images, str | Path) else images
    place = torch.device(resolve_device(device))
    network = trained.network.to(place).eval()
    preprocess = trained.preprocess.to(place)
    answers = []
    for path in images:
        pixels = _read_image(Path(path), trained).to(place)
        seen = _whole_to_window(preprocess(pixels[None]), trained)
        answers.append(_ranked(network(seen).softmax(1)[0], trained.classes, top))
    return answers


def _ready_to_ask(model: Trained | nn.Module | str | Path) -> Trained:
    if isinstance(model, Trained):
        return model
    found = carried_by(model) if isinstance(model, nn.Module) else load_checkpoint(model)
    if found is None:
        raise LowRankError(
            "predict needs a trained network, which knows its classes and how images are prepared: give a run's "
            "directory, or what load, load_pretrained or fit made."
        )
    return found


def how_far(path: str | Path, *, best: bool = False) -> str | None:
    """After how much of its training the weights are that `load_checkpoint` reads; None where after all of it.

    None as well for an exported file, which does not say.
    """
    path = Path(path)
    best = best or path.name.startswith("best-")
    whole = path if path.is_dir() else path.parent  # whether a run came to its end, its newest state knows
    stem = Store(whole).newest() if path.is_dir() or best else path.with_suffix("")
    if stem is None or not stem.with_suffix(".json").is_file():
        return None
    try:
        state = read_state(stem)
    except DamagedCheckpointError:  # the weights that were asked for are others, and were read
        return None
    position, epochs = Position(**state["position"]), int(state["recipe"]["epochs"])
    if position.done(epochs):
        return None
    chosen = Position(epoch=position.best_epoch) if best else position
    return chosen.told(epochs)


def _trained(
    model: nn.Module | str | Path, data: Data, preprocess: Preprocess | None, recipe: Recipe | None
) -> Trained:
    if not isinstance(model, nn.Module):
        return load_checkpoint(model)
    if preprocess is None and recipe is None and (carried := carried_by(model)):
        return carried
    recipe = recipe or Recipe()
    return Trained(
        model, preprocess or preprocessing(data.train, recipe), recipe, data.classes, data.test.size or ()
    )


def check_classes(trained: Trained, data: Data) -> None:
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
        how = f"image_size={trained.square}, channels={trained.channels} (--image-size {trained.square})"
        remedy = f"open the data with {how}" if trained.square else "give it images of that size"
        raise LowRankError(
            f"the network was trained on images of {'x'.join(map(str, trained.image))}, "
            f"{data.name} has images of {theirs}: {remedy}."
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
