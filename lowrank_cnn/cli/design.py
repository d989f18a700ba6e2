"""The command `lowrank design`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from lowrank_cnn.cli.options import (
    Batch,
    Device,
    Json,
    Latency,
    Macs,
    Model,
    SourceOptions,
    Threads,
    grouped,
    option,
)
from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.core.errors import LowRankError

if TYPE_CHECKING:
    from lowrank_cnn.choose.design import Advice

_BATCHES, _IMAGES = 4, 32
"""Batches, and images in each, that `--data` measures on."""


@grouped
def design_command(
    model: Model,
    named: SourceOptions,
    macs: Macs = None,
    latency: Latency = None,
    data: Annotated[
        str | None, option("Training images, to weigh what a trained network would lose as well.")
    ] = None,
    engine: Annotated[
        str, option("torch, optimize, an engine (onnx, openvino, ncnn, ...), or auto: the fastest.")
    ] = "torch",
    precision: Annotated[str | None, option("fp32, fp16 or bf16; in an engine fp32, fp16 or int8.")] = None,
    batch: Batch = 1,
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Advise whether low-rank filters, fewer filters or both are faster.

    Every layer is measured as strips and as a thinner conv, then whole networks within the budget are.

    Examples:

      lowrank design vgg11-gmp --macs 0.4
      lowrank design nin --pretrained cifar10 --latency 0.5 --data photos
    """
    from lowrank_cnn.choose.design import design
    from lowrank_cnn.cli.source import random_images
    from lowrank_cnn.core.clock import torch_threads
    from lowrank_cnn.train.distributed import resolve_device

    source, size = named.find(model)
    place = resolve_device(device)
    network = source.network.eval().to(place)
    example = random_images(network, size, batch, place)
    batches = None
    if data is not None:
        if source.trained is None:
            raise LowRankError("--data weighs what a trained network would lose: give a run, or --pretrained.")
        batches = source.images(data, size, batch=_IMAGES, batches=_BATCHES, device=place)
    with torch_threads(threads):
        how = {"macs": macs, "latency": latency, "engine": engine, "precision": precision}
        advice = design(network, example, data=batches, **how)
    if as_json:
        return print_json({"model": source.name, "input": list(example.shape), **advice.to_dict()})
    _print_advice(source.name, advice)
    return None


def _print_advice(name: str, advice: Advice) -> None:
    layers, networks = advice.tables()
    print_table(f"{name}: layers", *layers)
    print_table("Networks within the budget", *networks)
    console.print(advice.verdict, soft_wrap=True)
    if advice.device == "cpu" and advice.engine == "torch":
        told = "On a CPU, engines differ, since some have Winograd's algorithm: --engine auto takes the fastest."
        console.print(told, soft_wrap=True)
