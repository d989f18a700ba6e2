"""Device, precision and processes of a run, through Lightning Fabric.

The same call serves a laptop, one GPU, and every process that `torchrun` started, on one machine or several.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.clock import torch_threads
from lowrank_cnn.core.errors import LowRankError, option, require
from lowrank_cnn.kernels import forced

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_FOUND: dict[str, Callable[[], int]] = {
    "cpu": lambda: sys.maxsize,  # the CPU is one device, whatever number it is given
    "cuda": torch.cuda.device_count,
    "mps": torch.mps.device_count,
}


def import_fabric() -> ModuleType:
    """Fabric imports torchmetrics for its version alone, and with it transformers, which takes four seconds.

    A module without a version stands in for it: Fabric then asks the installed package.
    """
    empty = ModuleType("torchmetrics")
    if importlib.util.find_spec("torchmetrics"):
        sys.modules.setdefault("torchmetrics", empty)
    try:
        return require("lightning_fabric", extra="train", purpose="training")
    finally:
        if sys.modules.get("torchmetrics") is empty:
            del sys.modules["torchmetrics"]


def launch(device: str = "auto", precision: str = "auto") -> Fabric:
    """A Fabric on the device asked for, joined with the other processes that torchrun started."""
    fabric = import_fabric()
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its remarks on precision are in the record
    kind, _, index = resolve_device(device).partition(":")
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    match resolve_precision(precision, kind):
        case "fp16":  # by hand: Fabric would scale the loss by a scaler that looks at the device after every step
            plugins = require("lightning_fabric.plugins", extra="train", purpose="training")
            unscaled = torch.amp.GradScaler(kind, enabled=False)
            arithmetic: dict[str, Any] = {"plugins": [plugins.MixedPrecision("16-mixed", kind, scaler=unscaled)]}
        case resolved:
            arithmetic = {"precision": {"fp32": "32-true", "bf16": "bf16-mixed"}[resolved]}
    launched = fabric.Fabric(
        accelerator=kind,
        devices=local if world > 1 else [int(index)] if index else 1,
        num_nodes=max(1, world // local),
        strategy="ddp" if world > 1 else "auto",
        **arithmetic,
    )
    launched.launch()
    return launched


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
        raise LowRankError(f"there is no {kind.upper()} device here: use {option('device', 'cpu')}.")
    if (torch.device(device).index or 0) >= found:
        raise LowRankError(f"there is no device {device!r}: this machine has {found}, counted from 0.")
    return device if kind != "cpu" else "cpu"


def resolve_precision(precision: str, device: str) -> str:
    """fp32, bf16 or fp16: the one named, or bf16 where the GPU computes in it."""
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
    if fabric.world_size == 1 or fabric.device.type != "cuda":
        if norms and fabric.world_size > 1:
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
    return fabric.all_reduce(tensor.clone(), reduce_op="sum")  # type: ignore[return-value]


def copy_from_first(fabric: Fabric, tensors: Iterable[Tensor]) -> None:
    """Give all processes the values that these tensors have in the first, in place."""
    if fabric.world_size > 1:
        for tensor in tensors:
            value = tensor.contiguous()
            torch.distributed.broadcast(value, 0)
            tensor.copy_(value)


def from_all(fabric: Fabric, value: Any) -> list[Any]:
    """A plain value, or a tensor in main memory, from every process."""
    if fabric.world_size == 1:
        return [value]
    found: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(found, value)
    return found


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_RANK_STRIDE = 1_000_003  # keeps the processes' streams apart, and apart from those of neighbouring seeds


def conditions(fabric: Fabric) -> dict[str, Any]:
    """What decides the last bits of a result, by name: others add the same numbers in another order."""
    device = fabric.device
    return {
        "threads": torch.get_num_threads(),
        "processes": fabric.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@contextlib.contextmanager
def repeatable(on: bool, *, processes: int = 1) -> Iterator[None]:
    """Run the block with torch's deterministic algorithms; an operation that has none raises `LowRankError`."""
    if not on:
        yield
        return
    if processes > 1:
        raise LowRankError("deterministic is for one process: sums over several differ from run to run.")
    cudnn = torch.backends.cudnn
    with contextlib.ExitStack() as before:
        before.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        before.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        if _WORKSPACE not in os.environ:
            os.environ[_WORKSPACE] = ":4096:8"  # which cuBLAS reads when it is first used
            before.callback(os.environ.pop, _WORKSPACE, None)
        torch.use_deterministic_algorithms(True)
        cudnn.benchmark = False
        try:
            with torch_threads(None), forced("off"):  # the fused kernels add some gradients in any order
                yield
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            reason = str(error).partition(", but you set")[0].partition(". ")[0]
            raise LowRankError(f"this network cannot be trained with deterministic=true: {reason}.") from error


def seed_generators(seed: int, rank: int = 0) -> None:
    """Seed Python's, NumPy's and torch's generators; each process gets its own stream."""
    if not 0 <= seed < 2**32:
        raise LowRankError(f"a seed lies between 0 and {2**32 - 1}, not at {seed}.")
    seed = (seed + rank * _RANK_STRIDE) % 2**32
    random.seed(seed)
    _numpy().random.seed(seed)
    torch.manual_seed(seed)


def generator_states(device: torch.device) -> dict[str, Tensor]:
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = _numpy().random.get_state(legacy=True)
    states = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, Tensor], device: torch.device) -> None:
    version, *words = states["python"].tolist()
    has_spare, spare = states["python_gauss"].tolist()
    random.setstate((version, tuple(words), spare if has_spare else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    words = _numpy().array(keys, dtype="uint32")
    _numpy().random.set_state(("MT19937", words, position, has_gauss, states["numpy_gauss"].item()))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _numpy() -> ModuleType:
    return require("numpy", extra="train", purpose="training")
