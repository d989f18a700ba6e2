"""`predict`: classify images given as files, folders, arrays or bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from lowrank_cnn.data import Augment, Problems
from lowrank_cnn.data.augment import centre_crop, resize_shorter
from lowrank_cnn.data.images.decode import BadImageError, decode_image, stack
from lowrank_cnn.data.readers.folder import image_files, read_image
from lowrank_cnn.data.stream.streamed import frame
from lowrank_cnn.system.compare import unchanged
from lowrank_cnn.system.errors import LowRankError, require
from lowrank_cnn.train.fabric import resolve_device
from lowrank_cnn.train.outputs import ranking
from lowrank_cnn.train.short_runs import averaged_views
from lowrank_cnn.train.trained import Trained, carried_by, load_checkpoint

Ranking = list[tuple[str, float]]
"""Classes with their probabilities, the likeliest first."""


@overload
def predict(
    model: Any,
    images: Any,
    *,
    top: int = ...,
    device: str = ...,
    bad: Literal["refuse"] = ...,
    output: str | None = ...,
) -> list[Ranking]: ...
@overload
def predict(
    model: Any,
    images: Any,
    *,
    top: int = ...,
    device: str = ...,
    bad: Literal["skip"],
    output: str | None = ...,
) -> list[Ranking | None]: ...


@torch.no_grad()
def predict(
    model: Trained | nn.Module | str | Path,
    images: Any,
    *,
    top: int = 5,
    device: str = "auto",
    bad: Literal["refuse", "skip"] = "refuse",
    output: str | None = None,
) -> Any:
    """For each image the likeliest classes with their probabilities, the likeliest first.

    `model` is a run's directory, an exported file, or a network that was loaded or trained. `images` is one image
    or a list of them: a path, a folder (all image files below it, sorted), the bytes of a file, a PIL image, an
    array [H, W] or [H, W, C], or a tensor [C, H, W], the last two of uint8. With `bad="skip"` the answer for an
    image that cannot be read is None; else it is refused. `output` is the name or the number of the output with
    the class scores, of a network with several. Views of an image are averaged as `evaluate` averages them.

    >>> predict("runs/photos", ["holiday.jpg"], top=2)  # doctest: +SKIP
    [[('beach', 0.93), ('city', 0.05)]]
    """
    if not isinstance(top, int) or top < 1:
        raise LowRankError(f"top is the number of classes to name, at least 1, not {top!r}.")
    if bad not in ("refuse", "skip"):
        raise LowRankError(f"bad is refuse or skip, not {bad!r}.")
    trained = _with_preparation(model).with_output(output)
    place = torch.device(resolve_device(device))
    network = trained.network.to(place)
    forward, preprocess = averaged_views(network, trained.recipe), trained.preprocess.to(place)
    answers: list[Ranking | None] = []
    for image in each_image(images):
        try:
            pixels = _pixels(image, trained).to(place)
        except LowRankError:
            if bad == "refuse":
                raise
            answers.append(None)
            continue
        seen = _whole_to_window(preprocess(pixels[None]), trained)
        with unchanged(network, evaluating=True):
            scores = forward(seen)
        if bool(scores.isnan().any()):
            raise LowRankError("the network gives NaN in place of class scores.")
        answers.append(_ranked(scores, trained.classes, top))
    return answers


def each_image(images: Any) -> Iterator[Any]:
    """Yield the images to classify; a folder stands for the image files below it."""
    several = isinstance(images, Sequence) and not isinstance(images, str | bytes | bytearray)
    for image in images if several or isinstance(images, Iterator) else [images]:
        if isinstance(image, str | Path) and Path(image).is_dir():
            yield from files_below(Path(image))
        else:
            yield image


def files_below(folder: Path) -> list[Path]:
    """Image files at any depth below a folder, sorted; hidden ones are left out, and links are followed."""
    found = sorted(map(Path, image_files(folder, Problems())))
    if not found:
        raise LowRankError(f"there is no image below {folder}.")
    return found


def _with_preparation(model: Trained | nn.Module | str | Path) -> Trained:
    if isinstance(model, Trained):
        return model
    found = carried_by(model) if isinstance(model, nn.Module) else load_checkpoint(model)
    if found is None:
        raise LowRankError(
            "predict needs a trained network, which knows its classes and how images are prepared: give a run's "
            "directory, or what load, load_pretrained or fit made."
        )
    return found


def _pixels(image: Any, trained: Trained) -> Tensor:
    """Pixels [C, H, W]: whole at the one size of the training images, else framed as these were."""
    size = (trained.image[1], trained.image[2]) if trained.image else None
    framing = frame(size, Augment() if size else trained.augment, train=False, fill=())
    name = str(image) if isinstance(image, str | Path) else f"the {type(image).__name__}"
    try:
        data = _encoded(image)
        framed = framing(decode_image(data, channels=trained.channels, at_least=framing.at_least), None)
    except OSError as error:
        raise LowRankError(f"{name} cannot be read ({error.strerror or error}).") from error
    except BadImageError as error:
        raise LowRankError(f"{name} is not an image that can be used: {error}.") from error
    return stack([framed.tobytes()], framed.height, framed.width, trained.channels)[0].permute(2, 0, 1)


def _encoded(image: Any) -> bytes:
    """The bytes of an image file; pixels are written as PNG, so that they take the same way as a file."""
    if isinstance(image, str | Path):
        return read_image(image)
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    pillow = require("PIL.Image", extra="data", purpose="reading images")
    if not isinstance(image, pillow.Image):
        image = pillow.fromarray(_array(image))
    out = io.BytesIO()
    image.save(out, "TIFF" if image.mode in ("F", "CMYK") else "PNG")
    return out.getvalue()


def _array(image: Any) -> Any:
    """An array [H, W] or [H, W, C] of uint8 that Pillow takes, from an array or from a tensor [C, H, W]."""
    numpy = require("numpy", extra="data", purpose="reading images")
    if isinstance(image, Tensor):
        image = image.detach().cpu().movedim(0, -1).numpy() if image.ndim == 3 else image.detach().cpu().numpy()
    if not hasattr(image, "__array__"):
        raise LowRankError(
            f"predict takes paths, folders, bytes, PIL images, arrays and tensors, not a {type(image).__name__}."
        )
    pixels = numpy.asarray(image)
    pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    shaped = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    if pixels.dtype != numpy.uint8 or not shaped:
        raise LowRankError(
            f"an image is an array [H, W] or [H, W, C], or a tensor [C, H, W], of uint8, not {pixels.dtype} "
            f"{list(pixels.shape)}."
        )
    return numpy.ascontiguousarray(pixels)


def _whole_to_window(images: Tensor, trained: Trained) -> Tensor:
    """Scale and crop preprocessed images: whitening needs the whole image."""
    if not trained.image:
        return images
    window = trained.augment.window(images.shape[2], images.shape[3], train=False)
    return centre_crop(resize_shorter(images, trained.augment.resize), window)


def _ranked(scores: Tensor, classes: Sequence[str], top: int) -> Ranking:
    probabilities = scores.softmax(1)[0]
    return [(classes[int(place)], float(probabilities[place])) for place in ranking(scores)[0, :top]]
