"""The loss of a step: cross-entropy with its refinements, or the user's own; distillation from a teacher."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowrank_cnn.core.errors import LowRankError, to_caller
from lowrank_cnn.data import Split
from lowrank_cnn.data.own import DatasetSplit, in_short, listed_labels
from lowrank_cnn.train.recipe import Recipe

LOGITS = "logits"
"""The usual name of class scores, which needs no choice."""
_NUMBERED = re.compile(r"output_(\d+)")
"""Exported files name the outputs of a tuple so."""


def class_scores(outputs: Any, output: str | None = None) -> Tensor:
    """The tensor of class scores: the output of this name or number, else the only one, the first, or "logits"."""
    if isinstance(outputs, Tensor):
        if output not in (None, "0"):
            raise LowRankError(f"the network has one output, so that there is no output {output!r} to choose.")
        return outputs
    named = _by_name(outputs)
    in_a_row = isinstance(outputs, tuple | list) or all(map(_NUMBERED.fullmatch, named))
    if output is None:
        first = next(iter(named), LOGITS) if in_a_row or len(named) == 1 else LOGITS
        found = named.get(LOGITS, named.get(first))
    else:
        by_number = dict(zip(map(str, range(len(named))), named.values(), strict=True))
        found = named.get(output, by_number.get(output))
    if isinstance(found, Tensor):
        return found
    known = ", ".join(named) or f"a {type(outputs).__name__}"
    if output is not None:
        raise LowRankError(f"the network has no tensor as output {output!r}: its outputs are {known}.")
    raise LowRankError(
        f"the network returns {known}, and accuracy needs one tensor of class scores: name it by "
        f"{to_caller('output=NAME', '--output NAME (in training --set output=NAME)')}."
    )


def ranking(scores: Tensor) -> Tensor:
    """The classes [n, classes] of each image, the likeliest first. Of equal scores, which half precision has many
    of, the lower class comes first, as `argmax` chooses; `topk` chooses any.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices


def _by_name(outputs: Any) -> dict[str, Any]:
    """The outputs by name; those of a tuple are numbered as in an exported file."""
    if isinstance(outputs, Mapping):
        return {str(name): value for name, value in outputs.items()}
    if dataclasses.is_dataclass(outputs):
        return {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    if fields := getattr(outputs, "_fields", None):
        return dict(zip(fields, outputs, strict=True))
    if isinstance(outputs, tuple | list):
        return {f"output_{number}": value for number, value in enumerate(outputs)}
    return {}


Loss = Callable[[Any, Any], Tensor]
"""From the network's outputs and the targets of a batch to one number."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a batch. Targets are class numbers, or probabilities of classes where images were mixed.

    With a `teacher`, a share of the loss (`distill_weight`) compares with the teacher's answers, not the labels.
    """

    recipe: Recipe
    class_weights: Tensor | None = None
    loss: Loss | None = None
    teacher: Callable[[Tensor], Tensor] | None = None

    def __call__(self, outputs: Any, targets: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        """The loss to minimise, and the part of it that is shown: without auxiliary classifiers and teacher."""
        if self.loss is not None:
            loss = self.loss(outputs, targets)
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
    """How many answers are right, by class numbers or, if `blended`, by their probabilities; else None."""
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


def balanced_weights(split: Split, classes: int) -> Tensor:
    """A weight for each class that makes all classes count alike, whatever their numbers of images."""
    if isinstance(split, DatasetSplit) and listed_labels(split.dataset) is None:
        raise LowRankError(
            "class_weights=balanced counts the images of each class: give your Dataset a list `targets` of the "
            "class numbers of all items."
        )
    counts = split.labels.bincount(minlength=classes).double()
    present = counts > 0
    return torch.where(present, len(split.labels) / (present.sum() * counts.clamp_min(1)), 0.0).float()
