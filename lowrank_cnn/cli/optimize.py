"""The command `lowrank optimize`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lowrank_cnn.cli.convert import export_source
from lowrank_cnn.cli.deploy import Batch, Budget, Threads, Tries, input_shapes, inputs_on, print_variants
from lowrank_cnn.cli.options import Device, Inputs, Json, Model, Scheme, SourceOptions, grouped
from lowrank_cnn.cli.show import console, print_json
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.text import si


@grouped
def optimize_command(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="A file ending in .safetensors, .onnx, .pt2 or .ts.")],
    named: SourceOptions,
    scheme: Scheme = None,
    example: Inputs = None,
    batch: Batch = 1,
    device: Device = "auto",
    threads: Threads = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Try torch.compile too.")] = False,
    cache: Annotated[bool, typer.Option(help="Keep measured times for the next time.")] = True,
    repeats: Tries = 11,
    budget: Budget = 30.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
    as_json: Json = False,
) -> None:
    """Find the fastest form of a network, and write it to a file.

    A .safetensors holds the network with what was chosen: lr.load makes that form again without measuring, and
    compares it with the network. Other formats hold the layers alone, without what was chosen for this machine.

    Examples:

      lowrank optimize nin-c3-lr -o net.safetensors --pretrained cifar10
      lowrank optimize runs/photos -o net.safetensors --batch 16 --compile
      lowrank optimize model.py:make -o net.onnx --example model.py:inputs
    """
    from lowrank_cnn.deploy import optimize
    from lowrank_cnn.system.clock import torch_threads
    from lowrank_cnn.system.environment import environment
    from lowrank_cnn.train.fabric import resolve_device

    if out.exists() and not overwrite:
        raise LowRankError(f"{out} exists; --overwrite replaces it.")
    source, size, given = named.find_inputs(model, example, scheme=scheme, batch=batch)
    place = resolve_device(device)
    network = source.network.eval().to(place)
    inputs = inputs_on(place, network, size, given, batch=batch)
    how: dict[str, Any] = {"compile": compile_, "cache": cache, "repeats": repeats, "budget": budget}
    with torch_threads(threads):
        fast = optimize(network, inputs, **how)
        written = export_source(
            replace(source, network=fast), fast, out, size, example_input=given, overwrite=overwrite
        )
    if as_json:
        where = {"environment": environment(), "model": source.name, "input": input_shapes(inputs)}
        return print_json({**where, **fast.report.to_dict(), **written.to_dict()})
    print_variants(fast.report)
    console.print(f" {written.path}: {si(written.bytes)}B.", markup=False)
    return None
