"""Memory of a training step, by network and batch size.

    python -m benchmarks.memory [--part kept peaks] [--networks ...] [--images 224 56] [--batches 64 256] \
        [--out benchmarks/results/memory.json]

kept: the bytes per image that the forward pass keeps for the backward pass, without fused layers, in float32 on a
CPU. They do not depend on the machine. peaks: the peak allocation on a GPU during a step of `fit` (bf16, fused
layers). The record holds both parts with their environments; a run replaces the parts that it measures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.common import parser, write_record
from lowrank_cnn.core.environment import environment, is_out_of_memory
from lowrank_cnn.kernels.autotune.choice import prepare
from lowrank_cnn.kernels.device import for_graphs
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.step import TrainingStep, fused_to_train

STEPS = 2
"""Steps whose peak is recorded, after two more in which libraries choose their algorithms."""
WAY = "all maps kept"
"""The record also has rows of a way that the library no longer has."""
PARTS = ("kept", "peaks")

Row = dict[str, Any]


def network(name: str, image: int, device: torch.device, norm: str | None) -> nn.Module:
    torch.manual_seed(0)
    # As in the experiments, the first conv of GoogLeNet has stride 1 for small images.
    stride = 1 if name.startswith("googlenet") and image < 224 else None
    net = create_model(name, image_size=image, norm=norm, stride=stride).to(device).train()
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def batch_of(n: int, image: int, device: torch.device) -> tuple[Tensor, Tensor]:
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    images = torch.randn(n, 3, image, image, device=device, dtype=kind)
    return images.contiguous(memory_format=torch.channels_last), torch.arange(n, device=device) % 1000


def kept_per_image(net: nn.Module, image: int) -> int:
    """Bytes of the distinct tensors that a forward pass keeps for an image, weights apart."""
    own = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            found[place] = tensor  # kept alive, so that no other tensor reuses its address
        return tensor

    images, _ = batch_of(2, image, torch.device("cpu"))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        net(images)
    # The statistics of batch norm do not grow with the batch.
    maps = [tensor for tensor in found.values() if tensor.shape[:1] == (2,)]
    return sum(tensor.untyped_storage().nbytes() for tensor in maps) // 2


def peak(net: nn.Module, forward: nn.Module, batch: int, image: int, device: torch.device) -> Row:
    """Peak allocation in a step."""

    def run(images: Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return forward(images)

    def pull(loss: Tensor) -> None:
        loss.backward()

    step = TrainingStep(net, run, pull, Recipe(lr=1e-4), device)
    images, labels = batch_of(batch, image, device)
    step.prepare(1e-4, 0)
    with for_graphs():  # layers are chosen as in a run, which records its step
        prepare(lambda: run(images))
        for number in range(STEPS + 2):
            if number == 2:
                torch.cuda.reset_peak_memory_stats()
            step(images, labels)
            torch.cuda.synchronize()
    return {"peak_bytes": torch.cuda.max_memory_allocated()}


def measure_kept(name: str, image: int, norm: str | None) -> Iterator[Row]:
    """On a CPU, where layers are not fused."""
    net = network(name, image, torch.device("cpu"), norm)
    weights, kept = sum(4 * parameter.numel() for parameter in net.parameters()), kept_per_image(net, image)
    yield {"network": name, "image": image, "way": WAY, "weight_bytes": weights, "kept_bytes_per_image": kept}


def measure_peaks(name: str, image: int, norm: str | None, batches: list[int]) -> Iterator[Row]:
    """A row for each batch size, on a GPU and fused as `fit` does."""
    device = torch.device("cuda")
    net = network(name, image, device, norm)
    forward = fused_to_train(net, (3, image, image))
    for batch in batches:
        row = {"network": name, "image": image, "way": WAY, "batch": batch}
        yield row | attempt(net, forward, batch, image, device)


def attempt(net: nn.Module, forward: nn.Module, batch: int, image: int, device: torch.device) -> Row:
    """None if it runs out of memory."""
    torch.cuda.empty_cache()
    try:
        return peak(net, forward, batch, image, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"peak_bytes": None}
    finally:
        net.zero_grad(set_to_none=True)


def rows_of(part: str, name: str, image: int, arguments: argparse.Namespace) -> Iterator[Row]:
    if part == "peaks":
        return measure_peaks(name, image, arguments.norm, arguments.batches)
    return measure_kept(name, image, arguments.norm)


def measure(part: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """A part of the record: its rows and its environment."""
    found: Row = {"norm": arguments.norm, "rows": [], "environment": environment()}
    for image in arguments.images:
        for name in arguments.networks:
            for row in rows_of(part, name, image, arguments):
                found["rows"].append(row)
                print(row, flush=True)
            yield found


def write(part: str, found: Row, out: Path) -> None:
    """The record with this part replaced."""
    record = json.loads(out.read_text()) if out.exists() else {}
    parts = {**{p: record[p] for p in PARTS if p in record}, part: found}
    newest = next(parts[p]["environment"] for p in reversed(PARTS) if p in parts)
    write_record(out, "memory", steps=STEPS, **parts, environment=newest)


def main() -> None:
    gpu = torch.cuda.is_available()
    made = parser(__doc__, "memory.json")
    made.add_argument("--part", nargs="+", default=["kept", "peaks"] if gpu else ["kept"], choices=PARTS)
    made.add_argument("--networks", nargs="+", default=[n for n in list_models() if not n.startswith("nin")])
    made.add_argument("--batches", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    made.add_argument("--images", type=int, nargs="+", default=[224, 56])
    made.add_argument("--norm", default=None)
    arguments = made.parse_args()
    for part in arguments.part:
        for found in measure(part, arguments):
            write(part, found, arguments.out)


if __name__ == "__main__":
    main()
