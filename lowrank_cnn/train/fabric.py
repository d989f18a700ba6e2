"""Where a run computes: device, precision and processes, through Lightning Fabric.

The same call serves a laptop, one GPU, and every process that `torchrun` started, on one machine or several.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from lowrank_cnn.system.errors import LowRankError, require
from lowrank_cnn.train.recipe import PRECISIONS

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Made = TypeVar("Made")
STRATEGIES = ("auto", "ddp")
_FOUND: dict[str, Callable[[], int]] = {
    "cpu": lambda: sys.maxsize,  # the CPU is one device, whatever number it is given
    "cuda": torch.cuda.device_count,
    "mps": torch.mps.device_count,
}
_FABRIC_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed"}
"""fp16 is set up by hand: Fabric would scale the loss by a scaler that looks at the device after every step."""


def launch(device: str = "auto", precision: str = "auto", strategy: str = "auto") -> Fabric:
    """A Fabric on the device asked for, joined with the other processes where there are any."""
    if strategy not in STRATEGIES:
        raise LowRankError(f"strategy is one of {', '.join(STRATEGIES)}, not {strategy!r}.")
    fabric = require("lightning_fabric", extra="train", purpose="training")
    kind, _, index = resolve_device(device).partition(":")
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    with _without_hints():
        launched = fabric.Fabric(
            accelerator=kind,
            devices=local if world > 1 else [int(index)] if index else 1,
            num_nodes=max(1, world // local),
            strategy="ddp" if world > 1 and strategy == "auto" else strategy,
            **_arithmetic(resolve_precision(precision, kind), kind),
        )
        launched.launch()
    return launched


def _arithmetic(precision: str, kind: str) -> dict[str, Any]:
    """Fabric's options for a precision."""
    if precision != "fp16":
        return {"precision": _FABRIC_PRECISION[precision]}
    plugins = require("lightning_fabric.plugins", extra="train", purpose="training")
    unscaled = torch.amp.GradScaler(kind, enabled=False)
    return {"plugins": [plugins.MixedPrecision("16-mixed", kind, scaler=unscaled)]}


@contextlib.contextmanager
def _without_hints() -> Iterator[None]:
    """Show Fabric's warnings, but not its remarks on precision, which the record has."""
    log = logging.getLogger("lightning_fabric")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def resolve_device(device: str) -> str:
    """The device to use: the one named, or the GPU where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise LowRankError(f"there is no device {device!r}: use auto, cpu, cuda, cuda:1 or mps.") from error
    if kind not in _FOUND:
        raise LowRankError(f"{device!r} is no device to compute on: use auto, cpu, cuda, cuda:1 or mps.")
    if not (found := _FOUND[kind]()):
        raise LowRankError(f"there is no {kind.upper()} device here: use --device cpu.")
    if (torch.device(device).index or 0) >= found:
        raise LowRankError(f"there is no device {device!r}: this machine has {found}, counted from 0.")
    return device if kind != "cpu" else "cpu"


def resolve_precision(precision: str, device: str) -> str:
    """fp32, bf16 or fp16: the one named, or bf16 where the GPU computes in it."""
    if precision not in PRECISIONS:
        raise LowRankError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}.")
    if precision != "auto":
        return precision
    return "bf16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "fp32"


@contextlib.contextmanager
def batch_norm_over_all(fabric: Fabric, network: nn.Module, say: Callable[[str], None]) -> Iterator[None]:
    """Let batch norm use the whole batch of several GPUs within the block; on CPUs, say that it cannot.

    The layers that do so share all tensors with the network's own, which must be on its device already.
    """
    norms = {
        name: module
        for name, module in network.named_modules(remove_duplicate=False)
        if name and isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    if fabric.world_size == 1 or not norms:
        yield
        return
    if fabric.device.type != "cuda":
        say(f"Batch norm sees only the part of a batch that each of the {fabric.world_size} processes has.")
        yield
        return
    nn.SyncBatchNorm.convert_sync_batchnorm(network)
    try:
        yield
    finally:
        for name, norm in norms.items():
            network.set_submodule(name, norm.train(network.training))


def sum_over_processes(fabric: Fabric, tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes."""
    return fabric.all_reduce(tensor.clone(), reduce_op="sum")  # type: ignore[return-value]


def copy_from_first(fabric: Fabric, tensors: Iterable[Tensor]) -> None:
    """Give all processes the values that these tensors have in the first, in place."""
    if fabric.world_size > 1:
        for tensor in tensors:
            value = tensor.contiguous()
            torch.distributed.broadcast(value, 0)
            tensor.copy_(value)


def gather_tensors(fabric: Fabric, tensor: Tensor) -> list[Tensor]:
    """A tensor of equal shape from every process, in main memory."""
    if fabric.world_size == 1:
        return [tensor.cpu()]
    return list(fabric.all_gather(tensor.to(fabric.device)).cpu())  # type: ignore[union-attr]


def gather_objects(fabric: Fabric, value: Any) -> list[Any]:
    """A plain value from every process."""
    if fabric.world_size == 1:
        return [value]
    found: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(found, value)
    return found


def made_by_first(make: Callable[[], Made], device: str) -> Made:
    """What the first process makes, in all processes that torchrun started; they all raise its error."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return make()
    fabric = launch(device)
    made, failure = None, None
    if fabric.is_global_zero:
        try:
            made = make()
        except Exception as error:  # raised below: the others wait for an answer
            failure = error
    made, told = fabric.broadcast((made, failure and str(failure)))
    if failure is not None:
        raise failure
    if told is not None:
        raise LowRankError(told)
    return made  # type: ignore[return-value]


def agree_on(fabric: Fabric, wish: int) -> int:
    """The largest value of any process, so that all of them do the same thing at the same step."""
    if fabric.world_size == 1:
        return wish
    return max(int(other) for other in gather_tensors(fabric, torch.tensor([wish])))
