"""The effect of an initialisation on the gradient of a deep stack of mixed-shape composites.

    python -m benchmarks.init_depth [--out benchmarks/results/init_depth.json]

Thirty composites of 384 filters, each with its ReLU, on 8x8 feature maps. A gradient of unit variance is
propagated from the output; the figure is its variance at the input (and, forward, the mean square of the output).
The same for every scheme, through twelve layers of the paper's initialisation: single draws of narrow stacks vary,
and their mean shows whether an initialisation preserves the signal.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import geometric_mean, mean, median

import torch
from torch import nn

from benchmarks.common import parser, write_record
from lowrank_cnn.method.init import fan_in_, init_, per_group_, torch_default_
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import build_conv

WIDTH, DEPTH, PIXELS, SEEDS = 384, 30, 8, (0, 1, 2)
MIXES = (
    [(3, 1, 192), (1, 3, 192)],
    [(3, 1, 144), (1, 3, 144), (3, 3, 96)],
    [(5, 1, 160), (1, 5, 160), (1, 1, 64)],
)


SCHEMES = ("dense", "lr", "lr-join", "lr-join(m=0.25)", "separable", "mixture(kx1=3, 1xk=3, kxk=2, join)")
DRAWS = {32: 200, 128: 24}
"""Draws of each scheme by width: narrower stacks vary more."""


METHODS: dict[str, Callable[[nn.Module], object]] = {
    "composite (the paper's)": init_,
    "He fan-out per group": per_group_,
    "He fan-in per group": fan_in_,
    "PyTorch's default": torch_default_,
}


def deep_stack(padding_mode: str) -> nn.Sequential:
    convs = (CompositeConv2d(WIDTH, MIXES[i % 3], padding_mode=padding_mode) for i in range(DEPTH))
    return nn.Sequential(*(layer for conv in convs for layer in (conv, nn.ReLU())))


def ratios(stack: nn.Module, width: int = WIDTH) -> tuple[float, float]:
    """Variance of the gradient at the input, and mean square of the output, for unit ones."""
    x = torch.randn(4, width, PIXELS, PIXELS, requires_grad=True)
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


def by_scheme(scheme: str, width: int, padding_mode: str) -> dict[str, object]:
    """Twelve layers of one scheme: signals and gradients of many draws of their weights."""
    runs = []
    for seed in range(DRAWS[width]):
        torch.manual_seed(seed)
        convs = (build_conv(width, width, 3, scheme, padding=1, padding_mode=padding_mode) for _ in range(12))
        stack = nn.Sequential(*(layer for conv in convs for layer in (conv, nn.ReLU())))
        runs.append(ratios(init_(stack), width))
    backward, forward = ([run[i] for run in runs] for i in (0, 1))
    named = {"scheme": scheme, "width": width, "padding": padding_mode, "draws": len(runs)}
    moments = {"signal": mean(forward), "median_signal": median(forward)}
    return {**named, **moments, "gradient": mean(backward), "median_gradient": median(backward)}


def main() -> None:
    out = parser(__doc__, "init_depth.json").parse_args().out
    rows = [measure(name, padding) for padding in ("circular", "zeros") for name in METHODS]
    for row in rows:
        name, padding, gradient, signal = list(row.values())[:4]
        print(f"{name:24} {padding:9} gradient x{gradient:.2g}  signal x{signal:.2g}")
    schemes = [by_scheme(s, width, p) for p in ("circular", "zeros") for width in DRAWS for s in SCHEMES]
    for row in schemes:
        print(*row.values())
    setting = {"width": WIDTH, "depth": DEPTH, "pixels": PIXELS, "seeds": SEEDS}
    write_record(out, "init-depth", setting=setting, rows=rows, schemes=schemes)


if __name__ == "__main__":
    main()
