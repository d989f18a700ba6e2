"""A teacher for distillation: a trained network that is shown the batches of a run, prepared as it wants them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_cnn.data import Data, Preprocess, Standardize
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.train.trained import Trained, carried_by, load_checkpoint


def make_teacher(
    teacher: nn.Module | Trained | str | Path,
    data: Data,
    preprocess: Preprocess,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
) -> Callable[[Tensor], Tensor]:
    """The teacher as a function from images of the run to its answers, without gradients.

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
    translate = _translation(preprocess, trained.preprocess if trained else preprocess, device)
    network = network.to(device).eval()

    @torch.no_grad()
    def answer(images: Tensor) -> Tensor:
        with autocast():
            outputs = network(translate(images))
        return outputs[0] if isinstance(outputs, tuple) else outputs

    return answer


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
