"""Depthwise layers of ConvNeXt-T and InceptionNeXt-T: a copy of the map, torch and our kernels, in CUDA graphs.

    python -m benchmarks.depthwise

Each layer is timed forward and with its backward, as a depthwise 7x7, as InceptionNeXt's bands and as a 3x3. Every
result and gradient of ours is compared with torch in float64 on a few images. cuDNN chooses its fastest algorithm
(`torch.backends.cudnn.benchmark`). `blocks` says how many blocks of the network have such a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import lowrank_cnn as lr
from benchmarks.common import parser, run_command, write_record
from benchmarks.gpu_clock import milliseconds
from lowrank_cnn.kernels import forced

LAYERS = ((96, 56, 3), (192, 28, 3), (384, 14, 9), (768, 7, 3))
"""Channels, side of the map, and blocks of the network."""
COMPARED = 4
"""Images that are compared with float64."""


def layer_of(kind: str, channels: int) -> lr.CompositeConv2d:
    shapes = {"7x7": [(7, 7, 8)], "3x3": [(3, 3, 8)], "bands": [(5,), (3, 3, 1), (1, 11, 1), (11, 1, 1)]}[kind]
    groups = [lr.FilterGroup(*own, share * channels // 8, depthwise=True) for *own, share in shapes]
    return lr.CompositeConv2d(channels, groups, device="cuda", dtype=torch.bfloat16)


def step(layer: lr.CompositeConv2d, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(layer(x), [x, *layer.parameters()], grad)


def measure(kind: str, channels: int, side: int, batch: int) -> dict[str, Any]:
    """Times of one layer in ms by torch and by our kernels, and the errors of ours."""
    layer = layer_of(kind, channels)
    x = torch.randn(batch, channels, side, side, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    grad = torch.randn_like(x)
    row: dict[str, Any] = {"layer": kind, "channels": channels, "side": side}
    for name, mode in (("torch", "off"), ("ours", "on")):
        with forced(mode):
            with torch.no_grad():
                row[f"{name} forward"] = milliseconds(lambda: layer(x))
            row[f"{name} both"] = milliseconds(lambda: step(layer, x, grad))
    few, upstream = x[:COMPARED].detach().requires_grad_(), grad[:COMPARED]
    with forced("on"):
        found = (layer(few), *step(layer, few, upstream))
    with forced("off"):
        twin, exact = layer.double(), few.detach().double().requires_grad_()
        wanted = (twin(exact), *step(twin, exact, upstream.double()))
    row["error"] = max(
        float((a.detach() - b.detach()).norm() / b.detach().norm()) for a, b in zip(found, wanted, strict=True)
    )
    return row


def main() -> None:
    arguments = parser(__doc__, "depthwise.json")
    arguments.add_argument("--batch", type=int, default=256)
    arguments.add_argument("--only", help="one layer, as in 7x7@96: its kernels are then compiled, for later runs")
    options = arguments.parse_args()
    torch.backends.cudnn.benchmark = True
    if options.only:
        kind, _, channels = options.only.partition("@")
        side = next(side for own, side, _ in LAYERS if own == int(channels))
        print(measure(kind, int(channels), side, options.batch))
        return
    rows = []
    for channels, side, blocks in LAYERS:
        x = torch.randn(options.batch, side, side, channels, device="cuda", dtype=torch.bfloat16)
        y = torch.empty_like(x)
        copy = milliseconds(lambda x=x, y=y: y.copy_(x))
        for kind in ("bands", "7x7", "3x3"):
            rows.append({**measure(kind, channels, side, options.batch), "blocks": blocks, "copy": copy})
            print(rows[-1], flush=True)
    write_record(options.out, "depthwise", by_line="layers", batch=options.batch, layers=rows)


if __name__ == "__main__":
    run_command(main)
