"""Batch norms that also drop and activate, as timm's BatchNormAct2d does, taken apart into torch's own layers.

Such a norm is a subclass with children `drop` and `act`. Its forward calls functions, so a captured graph would
show no norm that can be folded or fused.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from lowrank_cnn.kernels.network_graph import has_hooks
from lowrank_cnn.system.compare import objection

_PARTS = ["drop", "act"]


def split_active_norms(model: nn.Module) -> nn.Module:
    """A copy of a model with torch's own layers in place of such norms; without any, the model itself."""
    parts = {id(part): copy.deepcopy(split) for part in model.modules() if (split := split_norm(part)) is not None}
    return copy.deepcopy(model, parts) if parts else model


def split_norm(norm: nn.Module) -> nn.Sequential | None:
    """The norm, its dropout and its activation in sequence, with the same tensors; None for other modules."""
    if not isinstance(norm, nn.BatchNorm2d) or list(norm._modules) != _PARTS or has_hooks(norm):
        return None
    plain = nn.BatchNorm2d.__new__(nn.BatchNorm2d)
    plain.__dict__.update(norm.__dict__)
    plain._modules = {}
    split = nn.Sequential(plain, *norm._modules.values())  # type: ignore[arg-type]
    split.training = norm.training
    return split if _is_same(split, norm) else None


def _is_same(split: nn.Module, norm: nn.BatchNorm2d) -> bool:
    """Whether both compute the same in evaluation: a class may use the names of these parts for something else."""
    ours, given = copy.deepcopy((split, norm))  # together, so that the copies share their tensors too
    numbers = torch.Generator().manual_seed(0)
    for tensor in (given.weight, given.bias, given.running_mean, given.running_var):
        if tensor is not None:  # fresh ones would hide in which order the parts run
            tensor.data.copy_(torch.rand(tensor.shape, generator=numbers) + 0.5)
    like = next((tensor for tensor in (given.weight, given.running_mean) if tensor is not None), torch.zeros(()))
    x = torch.randn((2, norm.num_features, 2, 2), generator=numbers).to(like)
    return not objection(ours.eval(), given.eval(), x)
