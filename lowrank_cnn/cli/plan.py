"""Commands that measure any network on this machine: time, plan and optimize."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import correlation
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lowrank_cnn.cli.convert import export_source
from lowrank_cnn.cli.options import (
    MODEL_HELP,
    Device,
    Inputs,
    Json,
    Model,
    Scheme,
    SourceOptions,
    Trusted,
    grouped,
    option,
)
from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.core.errors import LowRankError, LowRankWarning
from lowrank_cnn.core.notes import notes
from lowrank_cnn.core.progress import lasting
from lowrank_cnn.core.text import counted, si

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lowrank_cnn.cli.source import Source
    from lowrank_cnn.core.clock import Sample

Batch = Annotated[int, option("Images per batch.", min=1, max=10**6)]


def limit_threads(threads: int | None) -> int | None:
    """Limit the threads of OpenMP before torch starts them: on Arm its convs ignore `torch.set_num_threads`."""
    if threads is not None and threads > 0 and "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


Threads = Annotated[int | None, option("CPU threads; by default all cores.", max=1024, callback=limit_threads)]


@dataclass(frozen=True)
class SearchOptions:
    """What a network is run on, and how its fastest form is searched for."""

    scheme: Scheme = None
    example: Inputs = None
    batch: Batch = 1
    device: Device = "auto"
    threads: Threads = None
    compile_: Annotated[bool, option("Try torch.compile too.", "--compile")] = False
    cache: Annotated[bool, option("Keep measured times for the next time.")] = True
    repeats: Annotated[int, option("Runs per median of each way that is tried.")] = 11
    budget: Annotated[float, option("Seconds after which no further form is tried.")] = 30.0

    def place(self, network: nn.Module, size: tuple[int, ...] | None, given: Any) -> tuple[str, nn.Module, Any]:
        """The device, the network on it, and its inputs there: those of --example, or random images."""
        from torch import Tensor
        from torch.utils._pytree import tree_map_only

        from lowrank_cnn.train.distributed import resolve_device

        place = resolve_device(self.device)
        network = network.eval().to(place)
        if size is not None:
            return place, network, random_images(network, size, self.batch, place)
        return place, network, tree_map_only(Tensor, lambda tensor: tensor.to(place), given)

    def search(self, network: nn.Module, inputs: Any) -> Any:
        """The fastest form of a network."""
        from lowrank_cnn.deploy.optimize import optimize

        how: dict[str, Any] = {"compile": self.compile_, "cache": self.cache}
        return optimize(network, inputs, repeats=self.repeats, budget=self.budget, **how)


def random_images(network: nn.Module, size: tuple[int, ...], batch: int, place: str) -> Tensor:
    """Random images on a device, in the network's precision."""
    import torch

    from lowrank_cnn.models.network_file import dtype_of

    return torch.randn(batch, *size).to(place, dtype_of(network))


@grouped
def time_command(
    models: Annotated[list[str], typer.Argument(help=MODEL_HELP)],
    named: SourceOptions,
    scheme: Annotated[str | None, option("Convert first; compare with the network as it was.")] = None,
    example: Inputs = None,
    batch: Batch = 1,
    device: Device = "auto",
    threads: Threads = None,
    runtime: Annotated[Literal["torch", "onnx"], option("torch, or onnx (on the CPU).")] = "torch",
    repeats: Annotated[int, option("Runs per median.")] = 15,
    trusted: Trusted = False,
    as_json: Json = False,
) -> None:
    """Time networks layer by layer, beside their dense twins.

    A network and its twin run in turns, so that both see the same state of the machine. An exported file (.onnx,
    .pt2, ...) runs in its engine, on the CPU.

    Examples:

      lowrank time nin-c3-lr --batch 16
      lowrank time vgg11-gmp-lr --device cpu --threads 1
      lowrank time model.py:make --scheme lr --input 3x32x32 --runtime onnx
      lowrank time model.py:make --example model.py:inputs
    """
    from lowrank_cnn.cli.source import parse_size
    from lowrank_cnn.core.environment import environment
    from lowrank_cnn.deploy.engines.targets import is_engine_file
    from lowrank_cnn.deploy.timing import time_file, time_model

    options = {"batch": batch, "device": device, "threads": threads, "runtime": runtime, "repeats": repeats}
    timings = []
    for text in models:
        if is_engine_file(text):
            if scheme is not None or device not in ("cpu", "auto") or example is not None:
                told = f"{text} is timed as it is on the CPU, without --scheme, --device and --example."
                raise LowRankError(told)
            how: dict[str, Any] = {"batch": batch, "threads": threads, "repeats": repeats, "trusted": trusted}
            timings.append(time_file(text, parse_size(named.input_text), **how))
            continue
        source, size, given = named.find_inputs(text, example, scheme=scheme, batch=batch)
        inputs = given if size is None else size
        timings.append(time_model(source.network, inputs, twin=source.dense, **options))
    if as_json:
        return print_json({"environment": environment(), "timings": [timing.to_dict() for timing in timings]})
    for timing in timings:
        _print_timing(timing)
    if example is None and any(timing.device == "cpu" and timing.twin is not None for timing in timings):
        _print_cpu_advice(named.words(models[0], scheme=scheme))
    if len(timings) > 2:
        r = correlation([t.macs for t in timings], [t.total.ms for t in timings])
        console.print(f" Over these networks, MACs and time correlate with r = {r:.3f}.")
    return None


@grouped
def plan_command(
    model: Model,
    named: SourceOptions,
    how: SearchOptions,
    twin: Annotated[
        bool, option("Compare with the dense network; with --engine, thinned to the same MACs.")
    ] = True,
    engine: Annotated[
        str | None, option("auto: time the installed engines (ONNX Runtime, OpenVINO, ncnn, ...); or one by name.")
    ] = None,
    out: Annotated[
        Path | None, option("With --engine: a directory for the fastest engine's file.", "--out", "-o")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest way to run a network on this machine.

    It measures every way to run each layer, and then the whole network. In Python: `lr.optimize`.

    Examples:

      lowrank plan nin-c3-lr
      lowrank plan model.py:make --scheme lr --input 3x32x32 --batch 16
      lowrank plan nin-c3-lr --engine auto --out engines
      lowrank plan model.py:make --example model.py:inputs
    """
    from lowrank_cnn.core.clock import torch_threads
    from lowrank_cnn.models.build import dense_twin

    source, size, given = named.find_inputs(model, how.example, scheme=how.scheme, batch=how.batch)
    if engine is not None:
        if how.batch != 1:
            raise LowRankError("--engine times one image at a time: leave --batch out.")
        size = size or _size_of_one(given)
        return plan_engines(source, size, engine, out, how.threads, twin=twin, as_json=as_json)
    place, network, inputs = how.place(source.network, size, given)
    with torch_threads(how.threads):
        fast = how.search(network, inputs)
        held = None
        if twin and (dense := source.dense or dense_twin(network)) is not None:
            rival = how.search(dense.eval().to(place), inputs)
            held = _beside(fast, rival, inputs, place) | {"macs": _macs(dense, inputs)}
    _show_plan(source.name, fast, inputs, held, macs=_macs(network, inputs), as_json=as_json)
    if place == "cpu" and size is not None and not as_json:
        _print_cpu_advice(named.words(model, scheme=how.scheme))
    return None


def _size_of_one(given: Any) -> tuple[int, ...]:
    """The size of the one input that --example gives to an engine."""
    import torch

    if isinstance(given, torch.Tensor) and given.is_floating_point() and given.dim() > 1 and len(given) == 1:
        return tuple(given.shape[1:])
    raise LowRankError(
        "--engine times one input at a time: let --example give one tensor, in floating point and with a batch of "
        "1, or leave --engine out."
    )


def input_shapes(inputs: Any) -> list[Any]:
    """The shape of an input, or the shapes of several, as JSON holds them."""
    import torch
    from torch.utils._pytree import tree_leaves

    shapes = [list(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return shapes[0] if isinstance(inputs, torch.Tensor) else shapes


def _macs(network: torch.nn.Module, inputs: Any) -> int | None:
    """Multiply-accumulates of a whole batch; None for a network that cannot be counted."""
    from lowrank_cnn.method.count import count

    try:
        return count(network, inputs).macs
    except LowRankError:
        return None


def _show_plan(
    name: str, fast: Any, inputs: Any, held: dict[str, Any] | None, *, macs: int | None, as_json: bool
) -> None:
    """Print the measured times, and those of the dense network (`held`), as text or JSON."""
    from lowrank_cnn.core.environment import environment

    plans = [found for part in fast.modules() if (found := notes(part).plan) is not None]
    if as_json:
        where = {"environment": environment(), "model": name, "input": input_shapes(inputs), "macs": macs}
        where |= {} if held is None else {"twin": held}
        return print_json({**where, **fast.report.to_dict(), "plans": [plan.to_dict() for plan in plans]})
    for plan in plans:
        _print_plan(name, plan)
    print_variants(fast.report)
    if held is not None:
        console.print(f" The dense network at its fastest ({held['choice']}): {held['twin_ms']:.2f} ms, in turns.")
        share = f", for {macs / held['macs']:.3f} of its MACs" if macs and held["macs"] else ""
        console.print(f" This one takes {held['ms'] / held['twin_ms']:.3f} of its time{share}.")
    return None


def _beside(fast: Any, rival: Any, inputs: Any, place: str) -> dict[str, Any]:
    """Time both optimised networks in turns: their own times were taken one after the other."""
    from lowrank_cnn.core.clock import measure
    from lowrank_cnn.core.modules import arguments

    args, kwargs = arguments(inputs, device=place, dtype=None)
    runs = {"ours": lambda: fast(*args, **kwargs), "rival": lambda: rival(*args, **kwargs)}
    times = measure(runs, cuda=place.startswith("cuda"))
    return {"choice": rival.report.choice, "twin_ms": times["rival"].ms, "ms": times["ours"].ms}


def _print_cpu_advice(network: str) -> None:
    """Name the command that measures what torch alone cannot tell: engines, precisions, and the thin rival."""
    told = " Other engines, in fp16 and int8, may be faster, and so may a thinner dense network. Measure them by"
    console.print(told)
    console.print(f"   lowrank plan {network} --engine auto", soft_wrap=True)


def _print_timing(timing: Any) -> None:
    def line(name: str, kind: str, macs: int, ms: float, shown: str) -> tuple[str, ...]:
        rate = f"{macs / ms / 1e6:.1f}" if macs and ms else ""
        return name, kind, si(macs) if macs else "", shown, rate

    rows = [line(layer.name, layer.type, layer.macs, layer.ms, f"{layer.ms:.3f}") for layer in timing.layers]
    rows.append(line("total", "", timing.macs, timing.total.ms, _ms(timing.total)))
    threads = "" if timing.device != "cpu" else f", {counted(timing.threads, 'thread')}"
    sizes = " and ".join("x".join(map(str, shape)) for shape in (timing.input, *timing.more_inputs))
    title = f"{timing.name}, {sizes}, {timing.runtime} on {timing.device}{threads}"
    print_table(title, ("layer", "<", "MACs", "ms", "GMAC/s"), rows)
    console.print(f" Median of {counted(timing.total.runs, 'run')}, quartiles {_spread(timing.total)} ms.")
    if timing.correlation is not None:
        console.print(f" Over the layers, MACs and time correlate with r = {timing.correlation:.3f}.")
    if timing.twin is not None:
        twin = timing.twin
        console.print(f" Dense twin {twin.name}: {_ms(twin.total)} ms, quartiles {_spread(twin.total)} ms.")
        time, macs = timing.total.ms / twin.total.ms, timing.macs / twin.macs
        console.print(f" That is {time:.3f} of its time, for {macs:.3f} of its MACs.")


def print_variants(report: Any) -> None:
    rows = [(name, _ms(time), _spread(time)) for name, time in report.times.items()]
    print_table("The whole network", ("variant", "ms", "quartiles"), rows)
    for name, why in report.failed.items():
        console.print(f" Left out: {name} ({why}).")
    console.print(f" Fastest: {report.choice}.")


def _print_plan(name: str, plan: Any) -> None:
    if plan.reason:
        return console.print(f" Not planned: {plan.reason}.")
    rows = []
    for decision in plan.decisions:
        times = "\n".join(f"{ms:.2f} {way}" for way, ms in decision.times.items())
        rows.append((decision.name, si(decision.macs), times, decision.choice))
    print_table(f"{name} on {plan.device}", ("layer", "MACs", "<ms each way", "<chosen"), rows)
    for decision in plan.decisions:
        for way, why in decision.failed.items():
            console.print(f" {decision.name}, {way}: {why}")
    return None


def _ms(sample: Any) -> str:
    return f"{sample.ms:.2f}"


def _spread(sample: Any) -> str:
    return f"{sample.low:.2f}-{sample.high:.2f}"


def plan_engines(
    source: Source,
    size: tuple[int, ...],
    engine: str,
    out: Path | None,
    threads: int | None,
    *,
    twin: bool,
    as_json: bool,
) -> None:
    """Time the engines on one image, print the table and the advice, and write the file of the fastest."""
    from lowrank_cnn.deploy.choose_engine import time_engines
    from lowrank_cnn.deploy.engines.targets import target_of

    chosen = [] if engine == "auto" else [engine]
    for name in chosen:
        target_of(name)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    found = time_engines(
        source.trained or source.network.eval(),
        size,
        rival=_thin_rival(source, size) if twin else None,
        engines=chosen,
        threads=threads or 0,
        out=out,
        overwrite=True,
        say=lasting,
    )
    if as_json:
        told = {"fastest": found.fastest, "verdict": found.verdict}
        print_json({"model": source.name, "input": [1, *size], **told, **asdict(found)})
        return
    shown = 5 if found.rival else 3
    columns = ("engine", "ms", "quartiles", "thin dense ms", "quartiles")[:shown]
    names = dict.fromkeys([*found.times, *found.rival])
    rows = [(name, *_cells(found.times.get(name)), *_cells(found.rival.get(name)))[:shown] for name in names]
    print_table(f"{source.name}, 1x{'x'.join(map(str, size))}", columns, rows)
    for name, why in found.failed.items():
        console.print(f" Left out: {name} ({why}).")
    console.print(f" {found.verdict}", soft_wrap=True)
    if found.path is not None:
        console.print(f" Written: {found.path}.")


def _cells(time: Sample | None) -> tuple[str, str]:
    return ("", "") if time is None else (_ms(time), f"{'' if time.steady else 'unsteady, '}{_spread(time)}")


def _thin_rival(source: Source, size: tuple[int, ...]) -> nn.Module | None:
    """The dense network, thinned to about the MACs of this one; None where there is none.

    Narrow networks are rounded to fewer channels at a time: in sixteens they would stay as they are.
    """
    from lowrank_cnn.method.count import count
    from lowrank_cnn.method.thin import thin
    from lowrank_cnn.models.build import dense_twin

    dense = source.dense or dense_twin(source.network)
    if dense is None:
        return None
    try:
        macs = count(source.network, size).macs
        share = macs / count(dense, size).macs
        for multiple in (16, 8, 4):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", LowRankWarning)
                thinner = thin(dense.eval(), macs=share, input_size=size, multiple=multiple).eval()
            if 0.8 < count(thinner, size).macs / macs < 1.2:
                return thinner
    except LowRankError:  # a network that cannot be thinned has no such rival
        pass
    return None


@grouped
def optimize_command(
    model: Model,
    out: Annotated[Path, option("A file ending in .safetensors, .onnx, .pt2 or .ts.", "--out", "-o")],
    named: SourceOptions,
    how: SearchOptions,
    overwrite: Annotated[bool, option("Replace a file that exists.", "--overwrite")] = False,
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
    from lowrank_cnn.core.clock import torch_threads
    from lowrank_cnn.core.environment import environment

    if out.exists() and not overwrite:
        raise LowRankError(f"{out} exists; --overwrite replaces it.")
    source, size, given = named.find_inputs(model, how.example, scheme=how.scheme, batch=how.batch)
    _, network, inputs = how.place(source.network, size, given)
    with torch_threads(how.threads):
        fast = how.search(network, inputs)
        written = export_source(source, fast, out, size, example_input=given, overwrite=overwrite)
    if as_json:
        where = {"environment": environment(), "model": source.name, "input": input_shapes(inputs)}
        return print_json({**where, **fast.report.to_dict(), **written.to_dict()})
    print_variants(fast.report)
    console.print(f" {written.path}: {si(written.bytes)}B.")
    return None
