"""Activation checkpointing: keep the maps between stages alone, compute a stage again when its gradient is due.

A stage is a stretch of a Sequential up to and with its pool, or a module of parallel branches. The maps at its end
are small; those inside, which the backward pass needs, are made a second time. A step then costs one more forward
pass and keeps a fraction of the maps.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

from lowrank_cnn.core.notes import notes
from lowrank_cnn.kernels.device import as_now


class Recomputed(nn.Module):
    """A stage whose inner maps are not kept for the backward pass. Statistics are gathered the first time only."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.random = any(isinstance(module, nn.modules.dropout._DropoutNd) for module in stage.modules())

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.stage(x)
        return checkpoint(  # type: ignore[return-value]
            self.stage,
            x,
            use_reentrant=False,
            preserve_rng_state=self.random,
            context_fn=lambda: (contextlib.nullcontext(), _repeating(self.stage, as_now())),
        )


def recomputed(model: nn.Module, *, within: Callable[[nn.Module], nn.Module] = lambda stage: stage) -> nn.Module:
    """A copy of a model, all tensors shared, that computes its convolutional stages again in the backward pass.

    `within` may rewrite a stage, to fuse its layers: in a network that is fused as a whole, no stages are left.
    """
    if notes(model).entries:
        return Recomputed(within(model))
    if not model._modules or is_parametrized(model):
        return model
    twin = copy.copy(model)
    if type(model).forward is nn.Sequential.forward:
        parts = [_recomputed_if_worth(stage, within) for stage in _stages(model)]
        children = OrderedDict((f"stage{number}", part) for number, part in enumerate(parts, start=1))
    else:
        # Not `named_children`, which passes over a module that has two names.
        parts = model._modules.items()
        children = {name: child and recomputed(child, within=within) for name, child in parts}
    twin._modules = children  # type: ignore[assignment]
    return twin


def _stages(chain: nn.Module) -> Iterator[nn.Sequential]:
    """A Sequential in stretches, each but the last closed by a pool.

    Dropout right behind a pool stands apart: in a stage, its draws would have to be repeated, which a CUDA graph
    cannot do.
    """
    stretch: OrderedDict[str, nn.Module] = OrderedDict()
    for name, child in chain._modules.items():
        assert child is not None, "a Sequential calls each of its steps"
        alone = not stretch and isinstance(child, nn.modules.dropout._DropoutNd)
        stretch[name] = child
        if alone or "Pool" in type(child).__name__ or getattr(child, "pool", None):
            yield nn.Sequential(stretch)
            stretch = OrderedDict()
    if stretch:
        yield nn.Sequential(stretch)


def _recomputed_if_worth(stage: nn.Sequential, within: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Convs have large maps; a head of linear layers has small ones, and dropout that would be drawn again."""
    convolves = any(parameter.dim() == 4 for parameter in stage.parameters())
    linear = any(isinstance(module, nn.Linear) for module in stage.modules())
    return Recomputed(within(stage)) if convolves and not linear else within(stage)


@contextlib.contextmanager
def _repeating(stage: nn.Module, choosing: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """Let the backward pass repeat the forward one: by the same kernels, and without counting twice."""
    before = [(buffer, buffer.clone()) for buffer in stage.buffers()]
    try:
        with choosing:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
