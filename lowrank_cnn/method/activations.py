"""Record the inputs and outputs of layers on a few images, and fit a layer to them by least squares.

After Zhang et al. 2015: the second half of a factored conv is fitted so that, from what the decomposed network
gives it, it gives what the original conv gives in the original network. This corrects errors of earlier layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils.data import Dataset, IterableDataset

from lowrank_cnn.core.compare import copied, tensors_of, unchanged
from lowrank_cnn.core.errors import LowRankError, explained
from lowrank_cnn.core.modules import first_input
from lowrank_cnn.method.chains import FactoredLayer, groups_of
from lowrank_cnn.method.geometry import enclosing_padding
from lowrank_cnn.method.layers import CompositeConv2d, weights_of
from lowrank_cnn.method.schemes import FactoredConv2d

Images = Tensor | Iterable[object]
"""Images as one batch, or batches of them; of a pair (images, labels) the labels are left out."""
_ROWS = 4
"""Output pixels that a fit takes, for each weight of a filter."""
_FEWEST_ROWS = 4096
_RIDGE = 1e-4
"""Ridge of the fit, as a share of the mean square of an input: it pulls weights towards their values before."""


def image_batches(images: Images, model: nn.Module) -> list[Tensor]:
    """Batches on the device and in the dtype of the model."""
    if isinstance(images, Dataset) and not isinstance(images, IterableDataset):
        raise LowRankError(
            "a Dataset gives single images, and all of them: give batches of some, as "
            "DataLoader(Subset(dataset, range(256)), batch_size=64) makes them."
        )
    like = next(model.parameters())
    batches = []
    for batch in [images] if isinstance(images, Tensor) else images:
        one = batch[0] if isinstance(batch, list | tuple) else batch
        if not isinstance(one, Tensor) or one.dim() < 2 or not len(one):
            raise LowRankError("images are a tensor [N, C, H, W], or batches of such tensors.")
        if not bool(one.isfinite().all()):
            raise LowRankError("the images hold values that are not finite.")
        batches.append(one.to(like.device, like.dtype))
    if not batches:
        raise LowRankError("there are no images to measure with.")
    return batches


@torch.no_grad()
def outputs(model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    """Every output of a model, its values on all images in one row; those that are no numbers are left out."""
    with unchanged(model, evaluating=True):
        results = [tensors_of(_run(model, batch)) for batch in batches]
    if not (results[0] and all(len(found) == len(results[0]) for found in results)):
        raise LowRankError("the model gives no tensors to compare, or not as many for every batch.")
    rows = [torch.cat([one.flatten() for one in found]) for found in zip(*results, strict=True)]
    numbers = [row.double() for row in rows if row.is_floating_point()]
    if not numbers:
        raise LowRankError("the model gives whole numbers alone (classes, say), which show no small differences.")
    return numbers


def output_error(given: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The mean relative squared error of all outputs; infinite where they have other shapes.

    Outputs count alike, whatever their scale: a layer that only one of several heads reads would seem of no use
    otherwise.
    """
    if [one.shape for one in given] != [one.shape for one in right]:
        return float("inf")
    return sum(map(relative_error, given, right)) / len(right)


def relative_error(given: Tensor, right: Tensor) -> float:
    """The squared error relative to the squared reference; infinite if it is not a number."""
    error = float((given - right).square().sum() / right.square().sum().clamp_min(1e-30))
    return error if error == error else float("inf")


@torch.no_grad()
def seen(model: nn.Module, layer: nn.Module, batches: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The inputs and outputs of one layer for each batch, with a pair for every call of the layer."""
    found: list[tuple[Tensor, Tensor]] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found.append((first_input(args, kwargs).detach(), output))

    hook = layer.register_forward_hook(keep, with_kwargs=True)
    try:
        with unchanged(model, evaluating=True):
            for batch in batches:
                _run(model, batch)
    finally:
        hook.remove()
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within the block, and restore the mode of every module after it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def refit(layer: FactoredConv2d | FactoredLayer, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """Fit the last layer of a chain to map these inputs to these targets, and return the remaining error."""
    *front, second = layer.children()
    pairs = zip(inputs, targets, strict=True)
    rows, wanted = _sampled(second, [_through(front, x, y) for x, y in pairs], targets)
    groups = rows.shape[1]
    biased = second.bias is not None
    before = _solution(second, groups)
    if biased:
        rows = torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], dim=2)
    gram = torch.einsum("rga,rgb->gab", rows, rows)
    held = (
        torch.eye(gram.shape[1], dtype=gram.dtype) * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * _RIDGE
    )
    right = torch.einsum("rga,rgd->gad", rows, wanted) + held.to(gram.device) @ before
    found = torch.linalg.solve(gram + held.to(gram.device), right)
    if not bool(found.isfinite().all()):
        found = before
    _put(second, found, biased)
    return relative_error(torch.einsum("rga,gad->rgd", rows, found), wanted)


def _through(layers: Sequence[nn.Module], x: Tensor, target: Tensor) -> Tensor:
    """Run layers in a row; a transposed conv is told the size of the target, on which its output depends."""
    for layer in layers:
        told = isinstance(layer, _ConvTransposeNd)
        x = layer(x, list(target.shape[-len(layer.kernel_size) :])) if told else layer(x)
    return x


def window_covariance(layer: FactoredConv2d, inputs: Sequence[Tensor]) -> Tensor:
    """[groups, a, a]: the second moments of the windows that the first half of a separable pair reads."""
    first = next(layer.children())
    rows, _ = _sampled(first, inputs, None)
    return torch.einsum("rga,rgb->gab", rows, rows) / len(rows)


def _sampled(
    layer: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Windows [rows, groups, weights per filter] of a conv, and [rows, groups, filters], at some output pixels."""
    generator = torch.Generator().manual_seed(0)
    weights = layer.weight[0].numel()  # type: ignore[index, union-attr]
    share = math.ceil(max(_FEWEST_ROWS, _ROWS * weights) / max(1, len(inputs)))
    windows, wanted = [], []
    groups = groups_of(layer) if isinstance(layer, nn.Linear | _ConvNd) else layer.groups
    for index, x in enumerate(inputs):
        rows = _windows(layer, x)
        chosen = torch.randperm(len(rows), generator=generator)[:share].to(rows.device)
        windows.append(rows[chosen].double().unflatten(1, (groups, -1)))  # type: ignore[arg-type]
        if targets is not None:
            flat = _pixels(layer, targets[index])
            wanted.append(flat[chosen].double().unflatten(1, (groups, -1)))  # type: ignore[arg-type]
    return torch.cat(windows), torch.cat(wanted) if wanted else windows[0].new_empty(0)


def _pixels(layer: nn.Module, y: Tensor) -> Tensor:
    """[pixels, channels]: the output of a conv or a linear layer, or the input of a pointwise one, as rows."""
    if isinstance(layer, nn.Linear):
        return y.flatten(0, -2)
    return y.movedim(-1 - len(layer.kernel_size), -1).flatten(0, -2)  # type: ignore[arg-type]


def _windows(layer: nn.Module, x: Tensor) -> Tensor:
    """[pixels, channels x taps]: what each output pixel of a conv sees."""
    if not isinstance(layer, nn.Conv2d | nn.Conv3d | CompositeConv2d):  # the join of a factored layer is pointwise
        return _pixels(layer, x)
    kernel, mode = layer.kernel_size, layer.padding_mode
    sides = enclosing_padding(layer.padding, kernel, layer.dilation)  # type: ignore[arg-type]
    x = x if x.dim() == len(kernel) + 2 else x[None]
    x = F.pad(x, [side for axis in reversed(sides) for side in axis], mode="constant" if mode == "zeros" else mode)
    for axis, (taps, step, every) in enumerate(zip(kernel, layer.stride, layer.dilation, strict=True), 2):
        x = x.unfold(axis, every * (taps - 1) + 1, step)[..., ::every]
    return x.movedim(1, len(kernel) + 1).flatten(len(kernel) + 1).flatten(0, len(kernel))


def _solution(layer: nn.Module, groups: int) -> Tensor:
    """The weights and the bias of a conv as a least-squares solution [groups, weights (+ bias), filters]."""
    weight = layer.weight.detach().double().flatten(1).unflatten(0, (groups, -1)).transpose(1, 2)  # type: ignore[union-attr, operator]
    if layer.bias is None:
        return weight
    bias = layer.bias.detach().double().view(groups, 1, -1)  # type: ignore[union-attr, operator]
    return torch.cat([weight, bias], dim=1)


def _put(layer: nn.Module, found: Tensor, biased: bool) -> None:
    weights = found[:, :-1] if biased else found
    target = weights_of(layer)[0]
    target.data.copy_(weights.transpose(1, 2).reshape(target.shape))
    if biased:
        layer.bias.data.copy_(found[:, -1].flatten())  # type: ignore[union-attr]


def _run(model: nn.Module, batch: Tensor) -> object:
    with explained(f"the model does not run on images of {list(batch.shape)}"):
        return model(*copied(batch))
