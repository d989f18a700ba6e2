"""What a step minimises: cross-entropy with its refinements, a loss of the user's own, and a teacher's answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowrank_cnn.data import Data, Preprocess, Split, Standardize
from lowrank_cnn.data.dataset import DatasetSplit, in_short, listed_labels
from lowrank_cnn.method.activations import evaluating
from lowrank_cnn.system.errors import LowRankError, first_line
from lowrank_cnn.system.memory import is_out_of_memory
from lowrank_cnn.train.outputs import class_scores
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.trained import Trained, carried_by, load_checkpoint

Loss = Callable[[Any, Any], Tensor]
"""From the network's outputs and the targets of a batch to one number."""


class Objective:
    """The loss of a batch. Targets are class numbers, or probabilities of classes where images were mixed.

    With a `teacher`, a share of the loss (`distill_weight`) asks for the teacher's answers in place of the labels.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        class_weights: Tensor | None = None,
        loss: Loss | None = None,
        teacher: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.recipe, self.class_weights, self.own, self.teacher = recipe, class_weights, loss, teacher

    def __call__(self, outputs: Any, targets: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        """The loss to minimise, and the part of it that is shown: without auxiliary classifiers and teacher."""
        if self.own is not None:
            loss = self.own(outputs, targets)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise LowRankError(f"a loss gives one number in a tensor for a batch, not {in_short(loss)}.")
            return loss, loss.detach()
        logits = class_scores(outputs, self.recipe.output)
        several = isinstance(outputs, tuple) and self.recipe.output is None
        auxiliary = [one for one in outputs if one is not None and one is not logits] if several else []
        shown = self._cross_entropy(logits, targets)
        loss = shown + self.recipe.aux_weight * sum(self._cross_entropy(a, targets) for a in auxiliary)
        if self.teacher is not None:
            share = self.recipe.distill_weight
            loss = (1 - share) * loss + share * self._distilled(logits, self.teacher(images))
        return loss, shown.detach()

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        smoothing = self.recipe.label_smoothing
        return functional.cross_entropy(logits.float(), targets, self.class_weights, label_smoothing=smoothing)

    def _distilled(self, logits: Tensor, theirs: Tensor) -> Tensor:
        """Hinton et al. (2015): the divergence at a temperature, scaled so that gradients keep their size."""
        heat = self.recipe.distill_temperature
        student = functional.log_softmax(logits.float() / heat, dim=1)
        teacher = functional.log_softmax(theirs.float() / heat, dim=1)
        return heat * heat * functional.kl_div(student, teacher, reduction="batchmean", log_target=True)


def hits(outputs: Any, targets: Any, *, blended: bool = False, output: str | None = None) -> Tensor | None:
    """How many answers are right, where targets are class numbers; None for other tasks.

    With `blended`, targets may be probabilities of classes, of which the largest counts.
    """
    try:
        logits = class_scores(outputs, output)
    except LowRankError:  # the user's own loss may take any outputs
        return None
    if not isinstance(targets, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        return None
    wanted = targets.argmax(1) if blended and targets.shape == logits.shape else targets
    if wanted.ndim != 1 or wanted.is_floating_point():
        return None
    return (logits.argmax(dim=1) == wanted).sum()


def class_balance(split: Split, classes: int) -> Tensor:
    """The balanced weights of a split to train on; refuses a data set of the user's own that lists no labels."""
    if isinstance(split, DatasetSplit) and listed_labels(split.dataset) is None:
        raise LowRankError(
            "class_weights=balanced counts the images of each class: give your Dataset a list `targets` of the "
            "class numbers of all items."
        )
    return balanced_weights(split.labels, classes)


def balanced_weights(labels: Tensor, classes: int) -> Tensor:
    """A weight for each class that makes all classes count alike, whatever their numbers of images."""
    counts = labels.bincount(minlength=classes).double()
    present = counts > 0
    weights = torch.where(present, len(labels) / (present.sum() * counts.clamp_min(1)), 0.0)
    return weights.float()


def make_teacher(
    teacher: nn.Module | Trained | str | Path,
    data: Data,
    preprocess: Preprocess,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    size: Sequence[int],
) -> Callable[[Tensor], Tensor]:
    """The teacher as a function from images of the run, of this size, to its answers, without gradients.

    A teacher that carries its preparation gets the images so prepared; any other gets them as the student does.
    """
    trained = teacher if isinstance(teacher, Trained) else None
    if isinstance(teacher, str | Path):
        trained = load_checkpoint(teacher)
    elif isinstance(teacher, nn.Module):
        trained = carried_by(teacher)
    network = trained.network if trained else teacher
    if not isinstance(network, nn.Module):
        raise LowRankError(f"a teacher is a network or the directory of a run, not a {type(teacher).__name__}.")
    if trained and trained.classes != data.classes:
        raise LowRankError("the teacher knows other classes than the data: it must know the same, in one order.")
    if trained and trained.input_size[1:] != tuple(size[1:]):
        theirs, ours = ("x".join(map(str, one[1:])) for one in (trained.input_size, size))
        raise LowRankError(f"the teacher was trained on images of {theirs}, and those of this run have {ours}.")
    translate = _translation(preprocess, trained.preprocess if trained else preprocess, device)
    network = network.to(device)

    @torch.no_grad()
    def answer(images: Tensor) -> Tensor:
        with autocast(), evaluating(network):
            outputs = network(translate(images))
        return class_scores(outputs, trained.recipe.output if trained else None)

    _check_answers(answer, size, len(data.classes), device)
    return answer


def _check_answers(
    answer: Callable[[Tensor], Tensor], size: Sequence[int], classes: int, device: torch.device
) -> None:
    """Refuse a teacher that cannot take the images, or has other than one score for each class."""
    try:
        found = tuple(answer(torch.zeros(1, *size, device=device)).shape)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        shape = "x".join(map(str, size))
        raise LowRankError(f"the teacher cannot take images of {shape}: {first_line(error)}.") from error
    if classes and found != (1, classes):
        told = "x".join(map(str, found[1:]))
        raise LowRankError(f"the teacher gives {told} scores for an image, and the data has {classes} classes.")


def _translation(ours: Preprocess, theirs: Preprocess, device: torch.device) -> Callable[[Tensor], Tensor]:
    """From images as the run prepares them to images as the teacher wants them."""
    if not isinstance(ours, Standardize) or not isinstance(theirs, Standardize):
        if type(ours) is not type(theirs):
            raise LowRankError("the teacher's images are prepared in another way than those of this run.")
        return lambda images: images
    one, other = ours.to(device), theirs.to(device)
    scale = (one.std / other.std)[:, None, None]
    shift = ((one.mean - other.mean) / other.std)[:, None, None]
    return lambda images: images * scale.to(images.dtype) + shift.to(images.dtype)
