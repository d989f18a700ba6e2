"""Commands for any network: convert, time, plan, export."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import correlation
from typing import Annotated, Any, Literal

import torch
import typer
from torch import nn

from lowrank_cnn.cli.models import Json
from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.cli.source import INTO_HELP, MODEL_HELP, Source, find_model, is_ours, parse_size
from lowrank_cnn.convert import Conversion, Cost, conversion_costs, convert
from lowrank_cnn.environment import environment
from lowrank_cnn.errors import LowRankError
from lowrank_cnn.selection import stages
from lowrank_cnn.units import si

Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
Input = Annotated[str | None, typer.Option("--input", help="Image size, as 3x224x224.")]
Pretrained = Annotated[
    bool, typer.Option("--pretrained", help="Trained weights: timm's, torchvision's, or the package's own.")
]
Width = Annotated[float | None, typer.Option(help="Scale the filters of one of our networks.")]
Norm = Annotated[str | None, typer.Option(help="batch, for one of our networks.")]
Batch = Annotated[int, typer.Option(help="Images at a time.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")]
Into = Annotated[str | None, typer.Option(help=INTO_HELP)]
Threads = Annotated[int | None, typer.Option(help="Threads on the CPU; all cores if not given.")]


def add_to(app: typer.Typer) -> None:
    app.command("convert")(convert_command)
    app.command("time")(time_command)
    app.command("plan")(plan_command)
    app.command("export")(export_command)


def convert_command(
    model: Model,
    scheme: Annotated[str, typer.Option(help="lr, lr-join, separable, mixture(...), with options.")] = "lr-join",
    where: Annotated[
        list[str] | None,
        typer.Option(help="Name, prefix or pattern of the layers, or a kernel as 3x3; repeatable."),
    ] = None,
    stage: Annotated[
        list[int] | None, typer.Option(help="The convs of one stage, counted from 1 by map size; repeatable.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Fit the trained filters instead of starting afresh.")
    ] = False,
    energy: Annotated[float | None, typer.Option(help="Fit, keeping this share of each layer's weights.")] = None,
    macs: Annotated[float | None, typer.Option(help="Fit, within this share of the MACs.")] = None,
    latency: Annotated[float | None, typer.Option(help="Fit, within this share of the time.")] = None,
    input_text: Input = None,
    pretrained: Pretrained = False,
    width: Width = None,
    norm: Norm = None,
    into: Into = None,
    out: Annotated[Path | None, typer.Option(help="Write the network: .safetensors, .onnx or .pt2.")] = None,
    as_json: Json = False,
) -> None:
    """Rewrite the spatial convolutions of any network by a scheme."""
    source = find_model(model, pretrained=pretrained, into=into, width=width, norm=norm)
    size = source.size(parse_size(input_text))
    network = source.network
    chosen = _where(where, stage, network, size)
    budget = {"energy": energy, "macs": macs, "latency": latency}
    if fit or any(value is not None for value in budget.values()):
        from lowrank_cnn.decompose import decompose

        new = decompose(network, scheme, where=chosen, input_size=size, **budget)
    else:
        new = convert(network, scheme, where=chosen)
    costs = conversion_costs(network, new, size)
    if out is not None:
        _export(new, out, size, overwrite=False)
    if as_json:
        return print_json(_conversion_json(source, size, new, costs))
    _print_conversion(source, size, new, costs)
    return None


def time_command(
    models: Annotated[list[str], typer.Argument(help=MODEL_HELP)],
    scheme: Annotated[str | None, typer.Option(help="Convert first; the network itself is then the twin.")] = None,
    batch: Batch = 1,
    device: Device = "cpu",
    threads: Threads = None,
    runtime: Annotated[Literal["torch", "onnx"], typer.Option(help="torch, or onnx for ONNX Runtime.")] = "torch",
    repeats: Annotated[int, typer.Option(help="Runs, of which the median counts.")] = 15,
    input_text: Input = None,
    width: Width = None,
    norm: Norm = None,
    into: Into = None,
    as_json: Json = False,
) -> None:
    """Time networks and their layers beside their MACs and their dense twins."""
    from lowrank_cnn.timing import time_model

    options = {"batch": batch, "device": device, "threads": threads, "runtime": runtime, "repeats": repeats}
    timings = []
    for text in models:
        source = find_model(text, into=into, width=width, norm=norm, scheme=scheme if is_ours(text) else None)
        twin = source.network if scheme and not is_ours(text) else None
        network = convert(twin, scheme) if twin is not None and scheme else source.network
        timings.append(time_model(network, source.size(parse_size(input_text)), twin=twin, **options))
    if as_json:
        return print_json({"environment": environment(), "timings": [timing.to_dict() for timing in timings]})
    for timing in timings:
        _print_timing(timing)
    if len(timings) > 2:
        r = correlation([t.macs for t in timings], [t.total.ms for t in timings])
        console.print(f" Over these networks, MACs and time correlate with r = {r:.3f}.")
    return None


def plan_command(
    model: Model,
    batch: Batch = 1,
    device: Device = "cpu",
    threads: Threads = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Try torch.compile too.")] = False,
    cache: Annotated[bool, typer.Option(help="Keep measured times for the next plan.")] = True,
    input_text: Input = None,
    width: Width = None,
    norm: Norm = None,
    into: Into = None,
    as_json: Json = False,
) -> None:
    """Measure the ways to run each layer on this machine, and the network as a whole."""
    from lowrank_cnn.clock import torch_threads
    from lowrank_cnn.deploy import optimize
    from lowrank_cnn.train.launch import resolve_device

    source = find_model(model, into=into, width=width, norm=norm)
    device = resolve_device(device)
    network = source.network.eval().to(device)
    if batch < 1:
        raise LowRankError(f"the batch must be positive, not {batch}.")
    image = torch.randn(batch, *source.size(parse_size(input_text)), device=device)
    with torch_threads(threads):
        fast = optimize(network, image, compile=compile_, cache=cache)
        where = {"environment": environment(), "model": source.name, "input": list(image.shape)}
    plans = [part.plan for part in fast.modules() if hasattr(part, "plan")]
    if as_json:
        return print_json({**where, **fast.report.to_dict(), "plans": [plan.to_dict() for plan in plans]})  # type: ignore[union-attr, operator]
    for plan in plans:
        _print_plan(source.name, plan)
    rows = [(name, _ms(time), _spread(time)) for name, time in fast.report.times.items()]
    print_table("The whole network", ("variant", "ms", "quartiles"), rows)
    for name, why in fast.report.failed.items():
        console.print(f" {name}: {why}", markup=False)
    console.print(f" Fastest: {fast.report.choice}.")
    return None


def export_command(
    model: Model,
    path: Annotated[Path, typer.Argument(help="A file ending in .onnx, .pt2 or .safetensors.")],
    scheme: Annotated[str | None, typer.Option(help="Convert first, with fresh weights.")] = None,
    merged: Annotated[bool, typer.Option("--merge", help="Fold batch norms and chains first, exactly.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
    input_text: Input = None,
    pretrained: Pretrained = False,
    width: Width = None,
    norm: Norm = None,
    into: Into = None,
    as_json: Json = False,
) -> None:
    """Write a network for other programs, compared with the original on random images."""
    from lowrank_cnn.deploy import merge

    source = find_model(model, pretrained=pretrained, into=into, width=width, norm=norm)
    network = convert(source.network, scheme) if scheme else source.network
    network = merge(network.eval()) if merged else network
    written = _export(network, path, source.size(parse_size(input_text)), overwrite=overwrite)
    if as_json:
        return print_json(written.to_dict())
    checked = "" if written.error is None else f", off by {written.error:.0e} at most"
    console.print(f" {written.path}: {written.bytes / 2**20:.1f} MiB{checked}.", markup=False)
    return None


def _export(network: nn.Module, path: Path, size: tuple[int, ...], *, overwrite: bool) -> Any:
    from lowrank_cnn.deploy import export

    return export(network, path, input_size=size, overwrite=overwrite)


def _where(
    patterns: list[str] | None, numbers: list[int] | None, network: nn.Module, size: tuple[int, ...]
) -> Any:
    """Patterns as they are, a kernel written 3x3 as a pair, and the layers of stages; None for no choice."""
    items = [tuple(map(int, p.split("x"))) if re.fullmatch(r"\d+x\d+", p) else p for p in patterns or []]
    found = stages(network, size) if numbers else ()
    for number in numbers or []:
        if not 1 <= number <= len(found):
            raise LowRankError(f"the network has {len(found)} stages, counted from 1; there is no stage {number}.")
        items += found[number - 1]
    return items or None


def _conversion_json(
    source: Source, size: tuple[int, ...], new: nn.Module, costs: tuple[Cost, ...]
) -> dict[str, Any]:
    fitted = getattr(new, "decomposition", ())
    report: Conversion = new.conversion  # type: ignore[assignment]
    return {
        "model": source.name,
        "input": list(size),
        **report.to_dict(),
        "costs": [vars(cost) for cost in costs],
        "fitted": [row.to_dict() for row in fitted],
    }


def _print_conversion(source: Source, size: tuple[int, ...], new: nn.Module, costs: tuple[Cost, ...]) -> None:
    report: Conversion = new.conversion  # type: ignore[assignment]
    kept = {row.name: f"{row.energy:.1%}" for row in getattr(new, "decomposition", ())}
    rows = [
        (
            change.name,
            change.after,
            si(cost.macs_before),
            si(cost.macs_after),
            si(cost.params_after),
            kept.get(change.name),
        )
        for change, cost in zip(report.changed, costs[:-1], strict=True)
    ]
    total = costs[-1]
    ratio = f"{total.macs_after / max(1, total.macs_before):.3f} of the MACs"
    rows.append(("total", ratio, si(total.macs_before), si(total.macs_after), si(total.params_after), None))
    columns = ("layer", "<filters now", "MACs", "now", "params", "energy" if kept else "")
    print_table(f"{source.name}, {'x'.join(map(str, size))}", columns, rows)
    if report.kept:
        print_table(
            "Left as they were", ("layer", "<", "<why"), [(k.name, k.layer, k.reason) for k in report.kept]
        )


def _print_timing(timing: Any) -> None:
    rows = [
        (
            layer.name,
            layer.type,
            si(layer.macs) if layer.macs else "",
            f"{layer.ms:.3f}",
            _rate(layer.macs, layer.ms),
        )
        for layer in timing.layers
    ]
    rows.append(("total", "", si(timing.macs), _ms(timing.total), _rate(timing.macs, timing.total.ms)))
    threads = "" if timing.device != "cpu" else f", {timing.threads} threads"
    title = f"{timing.name}, {'x'.join(map(str, timing.input))}, {timing.runtime} on {timing.device}{threads}"
    print_table(title, ("layer", "<", "MACs", "ms", "GMAC/s"), rows)
    console.print(f" Median of {timing.total.runs} runs, quartiles {_spread(timing.total)} ms.")
    if timing.correlation is not None:
        console.print(f" Over the layers, MACs and time correlate with r = {timing.correlation:.3f}.")
    if timing.twin is not None:
        twin = timing.twin
        console.print(f" Dense twin {twin.name}: {_ms(twin.total)} ms, quartiles {_spread(twin.total)} ms.")
        time, macs = timing.total.ms / twin.total.ms, timing.macs / twin.macs
        console.print(f" That is {time:.3f} of its time, for {macs:.3f} of its MACs.")


def _print_plan(name: str, plan: Any) -> None:
    rows = []
    for decision in plan.decisions:
        times = "\n".join(f"{ms:.2f} {way}" for way, ms in decision.times.items())
        rows.append((decision.name, si(decision.macs), times, decision.choice))
    print_table(f"{name} on {plan.device}", ("layer", "MACs", "<ms each way", "<chosen"), rows)


def _ms(sample: Any) -> str:
    return f"{sample.ms:.2f}"


def _spread(sample: Any) -> str:
    return f"{sample.low:.2f}-{sample.high:.2f}"


def _rate(macs: int, ms: float) -> str:
    return f"{macs / ms / 1e6:.1f}" if macs and ms else ""
