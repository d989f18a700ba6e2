"""What the last bits of a result depend on: random generators, and the order in which numbers are added.

Training is bit-identical when it is repeated or resumed on one CPU with the same number of threads. Another number
of threads or processes, or another device, adds the same numbers in another order. A run therefore records these
conditions, and `repeatable` makes it keep them. Checkpoints hold the state of every generator.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowrank_cnn.kernels import forced
from lowrank_cnn.system.clock import torch_threads
from lowrank_cnn.system.errors import LowRankError, require

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_RANK_STRIDE = 1_000_003  # keeps the processes' streams apart, and apart from those of neighbouring seeds


def conditions(fabric: Fabric) -> dict[str, Any]:
    """The conditions of this process that a result depends on in its last bits, by name."""
    device = fabric.device
    return {
        "threads": torch.get_num_threads(),
        "processes": fabric.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def changed_conditions(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each condition that differs, as name: (before, now); older checkpoints state none."""
    return {name: (saved[name], now[name]) for name in now if name in saved and saved[name] != now[name]}


@contextlib.contextmanager
def repeatable(on: bool, *, processes: int = 1) -> Iterator[None]:
    """Run the block with torch's deterministic algorithms, and put all settings back after it.

    An operation that has no deterministic algorithm raises `LowRankError`.

        with repeatable(True):
            train()
    """
    if not on:
        yield
        return
    if processes > 1:
        raise LowRankError("--deterministic is for one process: sums over several differ from run to run.")
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, ":4096:8")  # which cuBLAS reads when it is first used
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark = False
    try:
        with torch_threads(None), forced("off"):  # the fused kernels add some gradients in any order
            yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).partition(", but you set")[0].partition(". ")[0]
        raise LowRankError(f"this network cannot be trained with --deterministic: {reason}.") from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.benchmark = before[1]
        if before[2] is None:
            os.environ.pop(_WORKSPACE, None)


def keep_threads(saved: Mapping[str, Any]) -> None:
    """Compute with as many threads as the run did before, within `repeatable`, even on another machine."""
    threads = saved.get("threads")
    if torch.are_deterministic_algorithms_enabled() and isinstance(threads, int) and threads > 0:
        torch.set_num_threads(threads)


def seed_generators(seed: int, rank: int = 0) -> None:
    """Seed Python's, NumPy's and torch's generators; each process gets its own stream."""
    if not 0 <= seed < 2**32:
        raise LowRankError(f"a seed lies between 0 and {2**32 - 1}, not at {seed}.")
    seed = (seed + rank * _RANK_STRIDE) % 2**32
    random.seed(seed)
    _numpy().random.seed(seed)
    torch.manual_seed(seed)


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The state of every generator, as tensors."""
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
    """Restore every generator to the state that `generator_states` returned."""
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
