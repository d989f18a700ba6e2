"""What an initialisation does to the gradient of a deep stack of mixed-shape composites.

    python -m benchmarks.init_depth [--out benchmarks/results/init_depth.json]

Thirty composites of 384 filters, each with its ReLU, 8x8 maps. A gradient of unit variance is sent in at the top;
the figure is the variance of what arrives at the bottom (and, forward, the mean square of what leaves the top).
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import geometric_mean

import torch
from torch import nn

from benchmarks.common import parser, write_record
from lowrank_cnn.method.init import fan_in_, init_, per_group_, torch_default_
from lowrank_cnn.method.layers import CompositeConv2d

WIDTH, DEPTH, PIXELS, SEEDS = 384, 30, 8, (0, 1, 2)
MIXES = (
    [(3, 1, 192), (1, 3, 192)],
    [(3, 1, 144), (1, 3, 144), (3, 3, 96)],
    [(5, 1, 160), (1, 5, 160), (1, 1, 64)],
)


METHODS: dict[str, Callable[[nn.Module], object]] = {
    "composite (the paper's)": init_,
    "He fan-out per group": per_group_,
    "He fan-in per group": fan_in_,
    "PyTorch's default": torch_default_,
}


def deep_stack(padding_mode: str) -> nn.Sequential:
    convs = (CompositeConv2d(WIDTH, MIXES[i % 3], padding_mode=padding_mode) for i in range(DEPTH))
    return nn.Sequential(*(layer for conv in convs for layer in (conv, nn.ReLU())))


def ratios(stack: nn.Module) -> tuple[float, float]:
    """Variance of the gradient at the bottom, and mean square of the output, for unit ones going in."""
    x = torch.randn(4, WIDTH, PIXELS, PIXELS, requires_grad=True)
    out = stack(x)
    (arrived,) = torch.autograd.grad(out, x, torch.randn_like(out))
    return arrived.var().item(), out.detach().square().mean().item()


def measure(name: str, padding_mode: str) -> dict[str, object]:
    runs = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        stack = deep_stack(padding_mode)
        METHODS[name](stack)
        runs.append(ratios(stack))
    backward, forward = ([run[i] for run in runs] for i in (0, 1))
    means = {"gradient": geometric_mean(backward), "signal": geometric_mean(forward)}
    return {"initialisation": name, "padding": padding_mode, **means, "gradients": backward, "signals": forward}


def main() -> None:
    out = parser(__doc__, "init_depth.json").parse_args().out
    rows = [measure(name, padding) for padding in ("circular", "zeros") for name in METHODS]
    for row in rows:
        name, padding, gradient, signal = list(row.values())[:4]
        print(f"{name:24} {padding:9} gradient x{gradient:.2g}  signal x{signal:.2g}")
    setting = {"width": WIDTH, "depth": DEPTH, "pixels": PIXELS, "seeds": SEEDS}
    write_record(out, "init-depth", setting=setting, rows=rows)


if __name__ == "__main__":
    main()
