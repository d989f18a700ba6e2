"""`design`: how to make a network cheaper on this machine: with low-rank filters, thinner, or both.

Multiply-accumulates do not tell. A 3x3 conv may run by Winograd's algorithm, and strips may not; other kernels run
strips faster. Every layer is therefore measured in both forms, with the same MACs: strips (kx1 and 1xk), and a
dense conv with fewer filters. The faster form is advised. Then whole networks within the budget are measured in
turns: low-rank, thinner, and mixed, which has the advised form in each layer.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.choose.learn_shapes import layer_inputs
from lowrank_cnn.choose.target import PRECISIONS
from lowrank_cnn.core.clock import Sample, measure
from lowrank_cnn.core.compare import copied, unchanged
from lowrank_cnn.core.errors import LowRankError, LowRankWarning, check_choice, explained, option
from lowrank_cnn.core.numbers import round_up
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.core.text import text_table
from lowrank_cnn.deploy.blocks import has_strips
from lowrank_cnn.deploy.choose_engine import write_to_time
from lowrank_cnn.deploy.engines.targets import ENGINES as FILE_ENGINES
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.optimize import optimize
from lowrank_cnn.method.budget import Budget
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.rewrite import copy_with, in_channels_last
from lowrank_cnn.method.schemes import build_conv, parse_scheme
from lowrank_cnn.method.select import check_rewritable, select
from lowrank_cnn.method.thin import thin

CLEARLY = 0.97
"""Times that differ by less than this are called equal: then thinner is advised, which is simpler."""
FILTER_MULTIPLE = 16
"""Kernels of most engines are made for multiples of this many filters."""
DENSE, LOW_RANK, THINNER, MIXED = "dense", "low-rank", "thinner", "mixed"
ENGINES = ("torch", "optimize", *FILE_ENGINES)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Table = tuple[Sequence[str], list[tuple[str, ...]]]


@dataclass(frozen=True)
class LayerAdvice:
    """One conv: milliseconds dense, as strips, and thinner with as many MACs; the form to take, and why."""

    name: str
    dense_ms: float
    strips_ms: float
    thin_ms: float
    choice: str
    why: str


def variants_of(conv: nn.Conv2d) -> dict[str, nn.Module]:
    """A conv, its strips, and a dense conv with as many MACs as these; also with filters in a number that suits.

    A third of 64 filters is 21, which may take longer than 32: then a user would take 32.
    """
    options: dict[str, Any] = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    options |= {"padding_mode": conv.padding_mode, "bias": conv.bias is not None}
    strips = build_conv(conv.in_channels, conv.out_channels, conv.kernel_size, "lr", **options)
    height, width = conv.kernel_size
    fewer = max(1, round(conv.out_channels * (height + width) / 2 / (height * width)))
    rounded = min(conv.out_channels, round_up(fewer, FILTER_MULTIPLE))
    return {
        "dense": conv,
        "strips": strips,
        "thin": nn.Conv2d(conv.in_channels, fewer, (height, width), **options),
        "thin, rounded up": nn.Conv2d(conv.in_channels, rounded, (height, width), **options),
    }


def layer_advice(name: str, ms: Mapping[str, float]) -> LayerAdvice:
    """The faster of both forms with as many MACs."""
    thin = min(time for form, time in ms.items() if form.startswith("thin"))
    dense, strips = ms["dense"], ms["strips"]
    faster = LOW_RANK if strips < CLEARLY * thin else THINNER
    why = f"strips take {strips / dense:.2f} of its time, a thinner conv with as many MACs {thin / dense:.2f}"
    return LayerAdvice(name, dense, strips, thin, faster, why)


@dataclass(frozen=True)
class MeasuredForm:
    """A whole network within the budget: its shares of the dense MACs, parameters and time."""

    name: str
    macs: float
    params: float
    ms: float
    time: float


@dataclass(frozen=True)
class Advice:
    """The advice, as a sentence in `verdict`; `network` is the advised form with fresh weights, to be trained.

    If no form is faster, the choice is "dense", and `network` is a copy of the one given, with its weights.
    `layers` and `forms` are what was measured.
    """

    verdict: str
    choice: str
    network: nn.Module
    layers: tuple[LayerAdvice, ...]
    forms: tuple[MeasuredForm, ...]
    device: str
    engine: str

    def tables(self) -> tuple[Table, Table]:
        """The headings and rows of the layers, and of the whole networks; headings with < are left-aligned."""
        layers = [
            (r.name, f"{r.dense_ms:.3f}", f"{r.strips_ms:.3f}", f"{r.thin_ms:.3f}", r.choice, r.why)
            for r in self.layers
        ]
        forms = [(f.name, f"{f.macs:.3f}", f"{f.params:.3f}", f"{f.ms:.3f}", f"{f.time:.2f}") for f in self.forms]
        return (
            (("<layer", "dense ms", "strips ms", "thin ms", "<take", "<why"), layers),
            (("<network", "MACs", "params", "ms", "of the time"), forms),
        )

    def __str__(self) -> str:
        texts = [
            text_table([name[1:] if name[0] == "<" else f">{name}" for name in names], rows)
            for names, rows in self.tables()
        ]
        return "\n\n".join([*texts, self.verdict])

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON can hold; without the network."""
        told = {"verdict": self.verdict, "choice": self.choice, "device": self.device, "engine": self.engine}
        return {**told, "layers": [asdict(r) for r in self.layers], "forms": [asdict(f) for f in self.forms]}


@unchanged()  # the forms that are tried draw weights
@progress("design")
def design(
    model: nn.Module,
    example: Tensor,
    *,
    macs: float | None = None,
    engine: str = "torch",
    precision: str | None = None,
    repeats: int = 9,
) -> Advice:
    """Advise how to bring a network to a share of its MACs, by what is measured on this machine.

    >>> advice = design(net, torch.randn(1, 3, 64, 64), macs=0.4)  # doctest: +SKIP
    >>> print(advice)  # doctest: +SKIP

    - `example`: a batch like those that the network will run on. Its device and dtype are measured.
    - `macs`: the share that is to be left.
    - `engine`: "torch" as it is, "optimize" for the form that `optimize` finds, or an engine of `export`: "onnx",
      "openvino", "ncnn", "mnn"...
    - `precision`: "fp32", "fp16" or "bf16" in place of the example's dtype; of engines "fp32", "fp16" or "int8",
      for which ranges come from random numbers: they are right for the time alone.
    """
    budget = Budget.of(macs=macs)
    if budget is None or budget.share == 1:
        raise LowRankError(f"design needs a budget below 1: {option('macs', 0.4)}.")
    check_choice("engine", engine, ENGINES)
    if not isinstance(example, Tensor) or example.dim() != 4 or not example.is_floating_point():
        raise LowRankError("the example is a batch of images in floating point, [N, channels, height, width].")
    (example,) = copied(example)
    in_torch = engine in ("torch", "optimize")
    if in_torch and precision not in (None, *_DTYPES):
        raise LowRankError(f"torch runs in {', '.join(_DTYPES)}, not in {precision!r}: name an engine for int8.")
    if not in_torch and precision not in (None, *PRECISIONS):
        raise LowRankError(f"engines run in {', '.join(PRECISIONS)}, not in {precision!r}.")
    if in_torch:
        example, precision = example.to(_DTYPES.get(str(precision), example.dtype)), None
    placed, size = _placed(model, example), tuple(example.shape[1:])
    dense = copy_with(model)
    for parameter in dense.parameters():  # no weight stays frozen: every form is to be trained from scratch
        parameter.requires_grad_(parameter.is_floating_point())
    clock = partial(times, engine=engine, precision=precision or "fp32", repeats=repeats)
    layers = advise_layers(placed, example, clock)
    networks, why_none = _forms(dense, size, budget.share, layers)
    taken, costs = clock(networks, example), {name: count(network, size) for name, network in networks.items()}
    forms = {
        name: MeasuredForm(
            name,
            macs=cost.macs / costs[DENSE].macs,
            params=cost.params / costs[DENSE].params,
            ms=taken[name].ms,
            time=taken[name].ms / taken[DENSE].ms,
        )
        for name, cost in costs.items()
    }
    choice, says = _best(forms)
    device = torch.cuda.get_device_name(example.device) if example.is_cuda else "cpu"
    kind = str(example.dtype).removeprefix("torch.") if precision in (None, "fp32") else precision
    cheaper = [form for form in forms.values() if form.name != DENSE]
    others = "; ".join(f"{f.name} {f.time:.2f} of the time with {f.macs:.2f} of the MACs" for f in cheaper)
    verdict = f"{says} Measured on {device} in {engine}, {kind}: {others}."
    if THINNER not in forms:
        verdict += f" No thinner network was measured: {why_none}."
    return Advice(verdict, choice, networks[choice], layers, tuple(forms.values()), device, engine)


def _placed(model: nn.Module, example: Tensor) -> nn.Module:
    """A copy of the network with the device and dtype of the example, which it takes."""
    check_rewritable(model)
    if any(tensor.is_meta for tensor in (example, *model.parameters())):
        raise LowRankError("on the meta device nothing takes time: put network and example on a real one.")
    placed = copy_with(model).to(example.device, example.dtype).eval()
    size = "x".join(map(str, example.shape))
    with explained(f"the network does not take an example of {size}"), torch.no_grad(), unchanged(placed):
        placed(*copied(example))
    return placed


def times(
    networks: Mapping[str, nn.Module], example: Tensor, *, engine: str, precision: str, repeats: int
) -> dict[str, Sample]:
    """Milliseconds of several networks on one example in one engine, in turns."""
    runs, (example,) = {}, copied(example)
    for name, network in networks.items():
        run = _prepared(network, example, engine, precision)
        runs[name] = lambda run=run: run(example)
    with torch.no_grad():
        return measure(runs, repeats=repeats, budget=2.0, cuda=example.is_cuda)


def _prepared(network: nn.Module, example: Tensor, engine: str, precision: str) -> Callable[[Tensor], Any]:
    placed: nn.Module = copy_with(network).to(example.device, example.dtype).eval()
    if engine == "torch":
        return in_channels_last(placed)
    if engine == "optimize":
        return optimize(placed, example, compile=False, cache=False, repeats=3)
    with tempfile.TemporaryDirectory() as scratch:
        strips = FILE_ENGINES[engine].strips and has_strips(placed)
        path = write_to_time(placed, engine, precision, example, Path(scratch), strips=strips)
        runner = open_engine(path, threads=torch.get_num_threads(), trusted=True)
    array = example.contiguous().numpy()
    return lambda _: runner(array)


def advise_layers(
    placed: nn.Module, example: Tensor, clock: Callable[[Mapping[str, nn.Module], Tensor], dict[str, Sample]]
) -> tuple[LayerAdvice, ...]:
    """Every spatial conv as it is, as strips, and thinner."""
    convs, _ = select(placed, parse_scheme("lr"))
    seen = layer_inputs(placed, list(convs), example)
    found = []
    for name, conv in convs.items():
        if conv.groups == 1 and name in seen:
            step(f"{name}, layer {len(found) + 1}")
            taken = clock(variants_of(conv), seen[name].contiguous(memory_format=torch.channels_last))
            found.append(layer_advice(name, {form: one.ms for form, one in taken.items()}))
    return tuple(found)


def _forms(
    dense: nn.Module, size: tuple[int, ...], share: float, layers: Sequence[LayerAdvice]
) -> tuple[dict[str, nn.Module], str]:
    """The network and its forms within a share of the MACs; why it cannot be made thinner, empty if it can."""
    strips = [row.name for row in layers if row.choice == LOW_RANK]
    networks, why = {DENSE: dense}, ""
    builders = {LOW_RANK: partial(_with_strips, where=None), THINNER: _thinner}
    builders |= {MIXED: partial(_with_strips, where=strips)} if 0 < len(strips) < len(layers) else {}
    for form, build in builders.items():
        try:
            with warnings.catch_warnings(action="ignore", category=LowRankWarning):  # forms are measured
                networks[form] = build(dense, size, share)
        except LowRankError as error:
            why = str(error).rstrip(".") if form == THINNER else why
    if len(networks) == 1:
        raise LowRankError(f"no form of this network reaches macs={share:g} here: {why}.")
    return networks, why


def _with_strips(
    model: nn.Module, size: tuple[int, ...], share: float, *, where: Sequence[str] | None
) -> nn.Module:
    """A network with strips in the layers named, or in all; thinner as well if strips do not save enough."""
    if where is None:
        with suppress(LowRankError):
            return convert(model, "lr", macs=share, input_size=size)
    cheaper = count(convert(model, "lr", where=where, input_size=size), size).macs / count(model, size).macs
    return convert(_thinner(model, size, min(1.0, share / cheaper)), "lr", where=where, input_size=size)


def _thinner(model: nn.Module, size: tuple[int, ...], share: float) -> nn.Module:
    """A thinner network of at most this share: `thin` gives the nearest, which may lie above."""
    allowed = share * count(model, size).macs
    for part in (1.0, 0.9, 0.7, 0.5, 0.3):
        found = thin(model, macs=part * share, input_size=size, multiple=8)
        if count(found, size).macs <= allowed:
            return found
    raise LowRankError(f"no thinner network has {share:.3f} of the MACs.")


def _best(forms: Mapping[str, MeasuredForm]) -> tuple[str, str]:
    """The form to take, and a sentence that says so."""
    best = min((form for form in forms.values() if form.name != DENSE), key=lambda form: form.time)
    plain = forms.get(THINNER)  # the simplest of all: another has to be clearly better
    if plain is not None and best.time >= CLEARLY * plain.time:
        best = plain
    choice = DENSE if best.time > CLEARLY else best.name
    return choice, {
        THINNER: "Make it thinner instead: low-rank filters are not faster here.",
        LOW_RANK: "Take low-rank filters.",
        MIXED: "Take low-rank filters in the layers listed as such, and make all layers thinner.",
        DENSE: "Leave it as it is: no cheaper form is faster here.",
    }[choice]
