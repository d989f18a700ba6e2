"""The least time a network could take on a device: its layers' operations and bytes over the device's limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_clock import milliseconds
from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.kernels.fused_convs import FusedComposite
from lowrank_cnn.kernels.problem import Problem, describe
from lowrank_cnn.models import create_model
from lowrank_cnn.models.network import Network

STRIDED = "/2"


@dataclass(frozen=True)
class Work:
    """A layer's multiply-accumulates and fewest bytes, in a forward pass and in a backward pass."""

    macs: int
    bytes: int
    back_macs: int
    back_bytes: int


@dataclass(frozen=True)
class Limits:
    """Measured limits of the device: TFLOP/s of bf16 matrix products, TB/s read plus written."""

    tflops: float
    tb_per_s: float

    def ms(self, macs: int, moved: int) -> float:
        return max(2 * macs / self.tflops / 1e9, moved / self.tb_per_s / 1e9)


def limits() -> Limits:
    """Measured with large matrices and a large pass over memory, medians of several.

    Not with `copy_`: in a graph it becomes a transfer by the copy engine, at two thirds of the rate of kernels.
    """
    a, b = (torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randint(0, 127, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    product, copy = milliseconds(lambda: a @ b)["ms"], milliseconds(lambda: torch.neg(source, out=target))["ms"]
    return Limits(2 * 8192**3 / product / 1e9, 2 * 4 * source.numel() / copy / 1e9)


def made(name: str) -> Network:
    """A network by name; a name that ends in /2 gets a first conv of stride 2, as on Places."""
    return create_model(name.removesuffix(STRIDED), stride=2 if name.endswith(STRIDED) else None)


def layers(name: str, batch: int) -> tuple[list[Problem], list[Work]]:
    """The convs of a network as kernel problems, and the work of all its layers."""
    problems: list[Problem] = []
    work: list[Work] = []
    with torch.device("meta"):
        given = made(name).eval()
        net = fuse(given)
        with _watched(net, problems, work), torch.no_grad():
            net(torch.empty((batch, *given.input_size)))  # type: ignore[misc]
    return problems, work


def floor_ms(work: list[Work], limit: Limits, mode: str) -> float:
    """Each layer's floor, summed: a layer cannot begin before the one before has ended."""
    forward = sum(limit.ms(layer.macs, layer.bytes) for layer in work)
    backward = sum(limit.ms(layer.back_macs, layer.back_bytes) for layer in work)
    return forward + (backward if mode == "training" else 0.0)


@contextmanager
def _watched(net: nn.Module, problems: list[Problem], work: list[Work]) -> Iterator[None]:
    def conv(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        problem = replace(describe(inputs[0], list(layer.weights), **layer.options), dtype=torch.bfloat16)
        problems.append(problem)
        work.append(_conv_work(problem))

    def linear(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        rows, weights = inputs[0].numel() // layer.in_features, layer.weight.numel()
        moved = 2 * (weights + rows * (layer.in_features + layer.out_features))
        work.append(Work(rows * weights, moved, 2 * rows * weights, 2 * moved))

    kinds = {FusedComposite: conv, nn.Linear: linear}
    hooks = [m.register_forward_pre_hook(kinds[type(m)]) for m in net.modules() if type(m) in kinds]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _conv_work(problem: Problem) -> Work:
    """Least bytes of a backward: read gradient, input, and codes of pool and ReLU; write the input gradient."""
    first = problem.channels <= 4
    result = problem.batch * problem.result_size[0] * problem.result_size[1] * problem.filters
    entry = problem.batch * problem.height * problem.width * problem.channels
    seen = result * (1 if problem.pool else 2)
    moved = 2 * result + seen + 2 * entry * (1 if first else 2)
    return Work(problem.macs, problem.bytes, problem.macs * (1 if first else 2), moved)
