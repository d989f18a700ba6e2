"""Memory of a training step, by network and batch size, with all maps kept and with stages computed again.

    python benchmarks/memory.py [--networks ...] [--batches 64 256] [--image 224] \
        [--out benchmarks/results/memory.json]

On a GPU: the most that was allocated during a step as `fit` makes it (bf16, fused layers), and its time.
Anywhere: what the forward pass keeps for the backward pass, per image, which is what the batch size multiplies.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lowrank_cnn.environment import environment
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.train.failure import is_out_of_memory
from lowrank_cnn.train.fused import fused_to_train
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.recompute import recomputed
from lowrank_cnn.train.step import Step

STEPS = 5
WAYS = {"all maps kept": False, "stages computed again": True}


def network(name: str, image: int, device: torch.device, norm: str | None) -> nn.Module:
    torch.manual_seed(0)
    net = create_model(name, image_size=image, norm=norm).to(device).train()
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def placed(net: nn.Module, image: int, again: bool) -> nn.Module:
    """As `fit` runs it on this device."""
    on_gpu = next(net.parameters()).is_cuda
    runs = fused_to_train(net, (3, image, image)) if on_gpu else net
    return recomputed(runs).train() if again else runs


def batch_of(n: int, image: int, device: torch.device) -> tuple[Tensor, Tensor]:
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    images = torch.randn(n, 3, image, image, device=device, dtype=kind)
    return images.contiguous(memory_format=torch.channels_last), torch.arange(n, device=device) % 1000


def kept_per_image(forward: nn.Module, net: nn.Module, image: int, device: torch.device) -> int:
    """Bytes of the distinct tensors that a forward pass keeps for an image, weights apart."""
    own = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            found[place] = tensor  # held, so that no other takes its place
        return tensor

    images, _ = batch_of(2, image, device)
    with saved_tensors_hooks(pack, lambda tensor: tensor), autocast(device):
        forward(images)
    # Copies of the weights in another type are kept once, whatever the batch.
    maps = [tensor for tensor in found.values() if tensor.shape[:1] == (2,)]
    return sum(tensor.untyped_storage().nbytes() for tensor in maps) // 2


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def peak(net: nn.Module, forward: nn.Module, batch: int, image: int, device: torch.device) -> dict[str, Any]:
    """The most that is allocated in a step, and the median time of a few."""

    def run(images: Tensor) -> Any:
        with autocast(device):
            return forward(images)

    def pull(loss: Tensor) -> None:
        loss.backward()

    step = Step(net, run, pull, Recipe(lr=1e-4), device)
    images, labels = batch_of(batch, image, device)
    step.prepare(1e-4, 0)
    times = []
    for number in range(STEPS + 2):
        if number == 2:  # libraries have chosen their algorithms
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        step(images, labels)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "ms": median(times[2:])}


def measure(name: str, arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for way, again in WAYS.items():
        net = network(name, arguments.image, device, arguments.norm)
        forward = placed(net, arguments.image, again)
        weights = sum(4 * parameter.numel() for parameter in net.parameters())
        base = {"network": name, "way": way, "weight_bytes": weights}
        base["kept_bytes_per_image"] = kept_per_image(forward, net, arguments.image, device)
        for batch in arguments.batches if device.type == "cuda" else [None]:
            rows.append(
                base | {"batch": batch} | (attempt(net, forward, batch, arguments, device) if batch else {})
            )
            print(rows[-1], flush=True)
        del net, forward
    return rows


def attempt(
    net: nn.Module, forward: nn.Module, batch: int, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    torch.cuda.empty_cache()
    try:
        return peak(net, forward, batch, arguments.image, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"peak_bytes": None, "ms": None}
    finally:
        net.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=[n for n in list_models() if not n.startswith("nin")])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--norm", default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/memory.json"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = [row for name in arguments.networks for row in measure(name, arguments, device)]
    setting = {"image": arguments.image, "norm": arguments.norm, "device": device.type, "steps": STEPS}
    record = {"kind": "memory", "setting": setting, "rows": rows, "environment": environment()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
