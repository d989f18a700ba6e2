"""A trained network with its classes and preprocessing, from a run, a file or the package; no code is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import evaluating
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.modules import checked_size, is_example
from lowrank_cnn.core.notes import TrainingCard, note, notes
from lowrank_cnn.core.text import counted, first_few
from lowrank_cnn.data import Augment, Preprocess, Standardize, preprocess_from_dict
from lowrank_cnn.data.preprocess import AsGiven, per_channel
from lowrank_cnn.data.streamed import frame
from lowrank_cnn.graph.finalize_shapes import finalize_shapes, has_learned
from lowrank_cnn.models import create_model
from lowrank_cnn.models.build import entry_description, rebuild
from lowrank_cnn.models.hub import resolve
from lowrank_cnn.models.network_file import (
    Stored,
    check_weights,
    is_exported,
    read_header,
    read_pretrained,
    read_weights,
)
from lowrank_cnn.train.inputs import Inputs, augmentation, check_fits
from lowrank_cnn.train.int8 import Ranges, ranges_of
from lowrank_cnn.train.objective import class_scores
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.run_folder import (
    DamagedCheckpointError,
    Position,
    RunDirectory,
    read_checkpoint,
    read_state,
)


@dataclass(frozen=True)
class Trained:
    """A network with the preprocessing of its images and the names of its classes.

    `image` is the size of the images it was trained on (channels, height, width) before any crop, of volumes
    (channels, depth, height, width), or empty if they differed in size. `held_out` says which images of its set
    it was not trained on, where the set came without test images: the share and seed (`val_split`), the number
    trained on, and the name and digest of the set.
    `ranges` are those of the layers' inputs, of a network trained with `quantize="int8"`.
    """

    network: nn.Module
    preprocess: Preprocess
    recipe: Recipe
    classes: tuple[str, ...]
    image: tuple[int, ...] = ()
    held_out: Mapping[str, Any] = field(default_factory=dict)
    ranges: Ranges = field(default_factory=dict)

    def __repr__(self) -> str:
        name = notes(self.network).name or type(self.network).__name__
        kinds = f"{counted(len(self.classes), 'class')} ({first_few(self.classes)})"
        return f"{name}, trained by the recipe {self.recipe.name} for {kinds}"

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour."""
        return self.image[0] if self.image else len(self.preprocess.to_dict()["mean"])

    @property
    def size_option(self) -> int | str | None:
        """The size of its images as `image_size` takes it: 64, or "48x64"; None where they differed in size."""
        if len(self.image) != 3:
            return None
        _, height, width = self.image
        return height if height == width else f"{height}x{width}"

    @property
    def input_size(self) -> tuple[int, ...]:
        """The size of the network's input (channels, height, width); empty where it takes several inputs."""
        if isinstance(self.preprocess, AsGiven) or len(self.image) > 3:  # not cropped
            return self.image
        return self.channels, *frame(self.image[1:] or None, self.augment, train=False, fill=()).window

    @property
    def augment(self) -> Augment:
        """How an image becomes the network's input; a network trained on many sizes scales every image."""
        augment = augmentation(self.recipe)
        return augment if self.image or isinstance(self.preprocess, AsGiven) else augment.for_any_size()

    def stored(self, input_size: Sequence[int] | None = None) -> Stored:
        """The network as files store it; `input_size` replaces the size of the images it was trained on."""
        return Stored(self.network, tuple(input_size or self.input_size), self.card())

    def card(self) -> TrainingCard:
        """Everything but the weights, as a file stores it and the network carries it."""
        data = {"classes": list(self.classes), "image": list(self.image), **self.held_out}
        tensors = {name: tensor.clone() for name, tensor in self.preprocess.to_dict().items()}
        found = {"int8": {name: list(ends) for name, ends in self.ranges.items()}} if self.ranges else {}
        return TrainingCard({"recipe": self.recipe.to_dict(), "data": data, **found}, tensors)

    def with_output(self, output: str | None) -> Trained:
        """The same, with the class scores in this output of the network; None leaves that as it is."""
        return self if output is None else replace(self, recipe=replace(self.recipe, output=output))

    def attach(self) -> Trained:
        """Let the network itself carry how its images are prepared, to `evaluate`, `predict` and `export`."""
        note(self.network, training_card=self.card())
        return self


def load_checkpoint(
    path: str | Path, *, best: bool = False, network: nn.Module | None = None, trusted: bool = False
) -> Trained:
    """The trained network of a run: its directory (the last weights, or the best), or one checkpoint file.

    An exported file, a saved folder or a repository of the Hub (`hf-hub:user/name`) works too, if its network was
    trained; a .pt2 or .ts needs `trusted`, since reading it can run code stored in it. The network is built from
    its name and options, and converted as it was. Pass your own network as `network`, before or after conversion.
    If the run kept a moving average of the weights, that is loaded.
    """
    path = resolve(path)
    if path.is_file() and path.suffix not in ("", ".json", ".safetensors"):
        from lowrank_cnn.deploy.export import load  # deploy builds on train: imported only for such a file

        found = carried_by(load(path, trusted=trusted))
    elif is_exported(path):
        found = trained_of(read_weights(path, into=network))
    else:
        return _of_run(path, best, network)
    if found is None:
        raise LowRankError(
            f"{path} does not say which classes it tells apart and how images are prepared for it: export it from "
            f"the run that trained it (lowrank export RUN {path.name})."
        )
    return found


def _of_run(path: Path, best: bool, network: nn.Module | None) -> Trained:
    """The trained network of a run, or of one of its checkpoints."""
    if not path.is_dir():
        if path.suffix and not path.exists():
            raise LowRankError(f"{path} does not exist.")
        if path.suffix not in ("", ".json", ".safetensors") or not path.with_suffix(".json").is_file():
            raise LowRankError(
                f"{path} is neither a run's directory, nor one of its checkpoints, nor an exported .safetensors."
            )
        checkpoint = read_checkpoint(path.with_suffix(""))
    elif best:
        checkpoint = RunDirectory(path).best()
    else:
        passed_over: list[str] = []
        checkpoint = RunDirectory(path).latest(passed_over.append)
        if checkpoint is None:
            raise LowRankError(f"{path} holds no checkpoint.")
        if passed_over:
            whole = f"{checkpoint.stem}.json is the newest whole one"
            raise LowRankError(f"{passed_over[0]} {whole}: name it to use it.")
    network = rebuild(entry_description(checkpoint.state["model"]), into=network)
    weights = checkpoint.part("average") or checkpoint.part("model")
    check_weights(path, {name: tensor.shape for name, tensor in sorted(weights.items())}, network)
    network.load_state_dict(weights)
    note(network, begun_from=path.name)
    card = {**checkpoint.state, "int8": ranges_of(checkpoint.part("int8"))}
    trained = _trained(network, checkpoint.part("preprocess"), card)
    if has_learned(network):
        return replace(trained, network=finalize_shapes(network, trained.input_size))
    return trained


def classes_of(path: str | Path) -> tuple[str, ...] | None:
    """The classes that the weights of a run or an exported file are for; None where they do not say."""
    try:
        return tuple(_card_of(path)["data"]["classes"])
    except (LowRankError, IndexError, KeyError, TypeError):  # loading them says what is wrong
        return None


def is_own(path: str | Path) -> bool:
    """Whether the weights of a run are for a network of the user's, which the run cannot build."""
    try:
        return entry_description(_card_of(path)["model"])["model"] is None
    except (LowRankError, IndexError, KeyError, TypeError):
        return False


def _card_of(path: str | Path) -> Any:
    path = resolve(path)
    stems = RunDirectory(path).stems("step") if path.is_dir() else [path.with_suffix("")]
    return read_header(path).card if is_exported(path) else read_state(stems[-1])


def how_far(path: str | Path, *, best: bool = False) -> str | None:
    """How far training was when its weights were saved; None if it was complete, or for an exported file."""
    path = Path(path)
    best = best or path.name.startswith("best-")
    whole = path if path.is_dir() else path.parent  # whether a run came to its end, its newest state knows
    stems = RunDirectory(whole).stems("step") if path.is_dir() or best else [path.with_suffix("")]
    try:
        state = read_state(stems[-1])
    except (IndexError, DamagedCheckpointError):  # an exported file; or the weights that were read are others
        return None
    position, epochs = Position(**state["position"]), int(state["recipe"]["epochs"])
    if position.done(epochs):
        return None
    chosen = Position(epoch=position.best_epoch) if best else position
    return chosen.told(epochs)


def load_pretrained(name: str, data: str) -> Trained:
    """A network with the weights that come with the package, and how its images are prepared.

    >>> import lowrank_cnn as lr
    >>> trained = lr.load_pretrained("nin-c3-lr", "cifar10")
    >>> trained.classes[:2], trained.input_size
    (('airplane', 'automobile'), (3, 32, 32))
    """
    found = read_pretrained(name, data)
    return _trained(create_model(name, pretrained=data), found.preprocess(), found.card or {})


def trained_of(stored: Stored) -> Trained | None:
    """The trained network in a file; None if the file holds only weights."""
    if stored.card is None:
        return None
    try:
        return _trained(stored.network, stored.card.preprocess, stored.card.card)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LowRankError("the file's card of its network is damaged: export the network again.") from error


def _trained(network: nn.Module, preprocess: Mapping[str, Tensor], card: Mapping[str, Any]) -> Trained:
    """From the tensors and the card that a run, a file or the package keeps."""
    data = card["data"]
    recipe, classes, image = Recipe.from_dict(card["recipe"]), tuple(data["classes"]), tuple(data["image"])
    ranges = {str(name): (float(low), float(high)) for name, (low, high) in (card.get("int8") or {}).items()}
    prepared, held_out = preprocess_from_dict(preprocess), held_out_part(data)
    return Trained(network, prepared, recipe, classes, image, held_out, ranges).attach()


def held_out_part(data: Mapping[str, Any]) -> dict[str, Any]:
    """From the description of a run's data, what finds its held-out images again; empty where it held out none."""
    known = ("name", "digest", "train", "val_split")
    return {key: data[key] for key in known if key in data} if data.get("val_split") else {}


def carried_by(network: nn.Module) -> Trained | None:
    """A loaded or trained network with the preparation that it carries; None where it carries none."""
    return trained_of(Stored(network, None, notes(network).training_card))


def loaded(model: nn.Module | Trained | str | Path) -> tuple[nn.Module, Trained | None]:
    """The network at a path, or the one given, and how it was trained, if it says so."""
    model = load_checkpoint(model) if isinstance(model, str | Path) else model
    if isinstance(model, Trained):
        return model.network, model
    return model, carried_by(model) if isinstance(model, nn.Module) else None


Teacher = nn.Module | Trained | str | Path


def make_teacher(
    teacher: Teacher, inputs: Inputs, device: torch.device, autocast: Callable[[], AbstractContextManager]
) -> Callable[[Tensor], Tensor]:
    """The teacher as a function from images of the run to its answers, without gradients.

    A teacher that carries its preparation gets the images so prepared; any other gets them as the student does.
    """
    if is_example(inputs.size):
        raise LowRankError("a teacher takes one image, and this network has several inputs: leave it out.")
    size, classes, preprocess = checked_size(inputs.size), inputs.data.classes, inputs.preprocess
    network, trained = loaded(teacher)
    if not isinstance(network, nn.Module):
        raise LowRankError(f"a teacher is a network or the directory of a run, not a {type(teacher).__name__}.")
    if trained and trained.classes != classes:
        raise LowRankError("the teacher knows other classes than the data: it must know the same, in one order.")
    if trained and trained.input_size[1:] != tuple(size[1:]):
        theirs, ours = ("x".join(map(str, one[1:])) for one in (trained.input_size, size))
        raise LowRankError(f"the teacher was trained on images of {theirs}, and those of this run have {ours}.")
    translate = _translation(preprocess, trained.preprocess if trained else preprocess, device)
    network, output = network.to(device), trained.recipe.output if trained else None
    try:
        check_fits(network, size, len(classes), device, output)
    except LowRankError as error:
        raise LowRankError(f"the teacher does not fit the data: {error}") from error

    @torch.no_grad()
    def answer(images: Tensor) -> Tensor:
        with autocast(), evaluating(network):
            outputs = network(translate(images))
        return class_scores(outputs, output)

    return answer


def _translation(ours: Preprocess, theirs: Preprocess, device: torch.device) -> Callable[[Tensor], Tensor]:
    """From images as the run prepares them to images as the teacher wants them."""
    if not isinstance(ours, Standardize) or not isinstance(theirs, Standardize):
        if type(ours) is not type(theirs):
            raise LowRankError("the teacher's images are prepared in another way than those of this run.")
        return lambda images: images
    one, other = ours.to(device), theirs.to(device)
    scale, shift = one.std / other.std, (one.mean - other.mean) / other.std

    def translated(images: Tensor) -> Tensor:
        return images * per_channel(scale, images).to(images.dtype) + per_channel(shift, images).to(images.dtype)

    return translated
