"""Networks over volumes: torch.compile against our kernels, bf16, on one GPU.

    python -m benchmarks.volumes [--only r3d_18]

r3d_18 by `lr` is timed against the compiled dense network, and r2plus1d_18, unchanged but through our kernels,
against its own compiled time: inference and a training step, each recorded as a CUDA graph. Ours are `optimize`,
and the same compiled step over our layers. The compiled rival takes the faster of two memory formats. Every
network has a process of its own: all compile at once, and then time in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import video  # pyright: ignore[reportMissingImports]

import lowrank_cnn as lr
from benchmarks.common import run_command
from benchmarks.depthwise_networks import (
    Ready,
    compiled_inference,
    measure_all,
    optimized_inference,
    training_by_torch,
)
from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.kernels import for_graphs, tune

NETWORKS = {"r3d_18": "lr", "r2plus1d_18": None}
"""The scheme of each network; None for the network as it is."""
BATCH, FRAMES, SIDE, CLASSES = 32, 16, 112, 400
FORMATS = {"contiguous": torch.contiguous_format, "channels_last_3d": torch.channels_last_3d}


def built(name: str, *, ours: bool = False) -> Any:
    torch.manual_seed(0)
    network, scheme = getattr(video, name)(), NETWORKS[name]
    return (lr.convert(network, scheme) if ours and scheme else network).cuda()


def clips() -> Tensor:
    return torch.randn(BATCH, 3, FRAMES, SIDE, SIDE, device="cuda").contiguous(
        memory_format=torch.channels_last_3d
    )


def inference(name: str) -> Ready:
    x = clips().bfloat16()
    ours, form = optimized_inference(built(name, ours=True).bfloat16().eval(), x)
    runs = {"ours": ours}
    for word, layout in FORMATS.items():
        network = built(name).bfloat16().to(memory_format=layout).eval()
        runs[f"torch {word}"] = compiled_inference(network, x.contiguous(memory_format=layout))
        torch._dynamo.reset()
    return Ready(runs, {"form": form})


def step(name: str) -> Ready:
    x, runs = clips(), {}
    for word, layout in FORMATS.items():
        network = built(name).to(memory_format=layout).train()
        runs[f"torch {word}"] = training_by_torch(network, x.contiguous(memory_format=layout), CLASSES)
        torch._dynamo.reset()
    network: nn.Module = fuse(built(name, ours=True).train())
    with for_graphs():  # kernels are measured before torch traces, which cannot
        with torch.autocast("cuda", torch.bfloat16):
            tune(network, x, training=True)
        return Ready(runs | {"ours": training_by_torch(network, x, CLASSES)}, {})


def compared(times: dict[str, Any]) -> dict[str, Any]:
    """The times with the compiler's best, and ours as a share of it."""
    if "error" in times:
        return times
    best = min(times[f"torch {word}"] for word in FORMATS)
    return times | {"torch": best, "ratio": round(times["ours"] / best, 3)}


def measured(name: str) -> dict[str, Callable[[], Ready]]:
    return {"inference": lambda: inference(name), "step": lambda: step(name)}


def main() -> None:
    measure_all(__doc__, "volumes", tuple(NETWORKS), measured, compared, batch=BATCH, frames=FRAMES, side=SIDE)


if __name__ == "__main__":
    run_command(main)
