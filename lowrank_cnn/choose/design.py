"""`design`: how to make a network cheaper on this machine: with low-rank filters, thinner, or both.

Multiply-accumulates do not tell. A 3x3 conv may run by Winograd's algorithm, and strips may not; other kernels run
strips faster. Every layer is therefore measured in both forms, with the same MACs: strips (kx1 and 1xk), and a
dense conv with fewer filters. The faster form is advised. Then whole networks within the budget are measured in
turns: low-rank, thinner, and mixed, which has the advised form in each layer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.choose.candidates import LOW_RANK, MIXED, THINNER, build_form
from lowrank_cnn.choose.learn_shapes import layer_inputs
from lowrank_cnn.choose.target import PRECISIONS
from lowrank_cnn.core.clock import Sample, measure
from lowrank_cnn.core.compare import copied, unchanged
from lowrank_cnn.core.errors import LowRankError, check_choice, explained, option
from lowrank_cnn.core.numbers import round_up
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.core.text import text_table
from lowrank_cnn.deploy.blocks import has_strips
from lowrank_cnn.deploy.choose_engine import write_to_time
from lowrank_cnn.deploy.engines.targets import ENGINES as FILE_ENGINES
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.deploy.optimize import optimize
from lowrank_cnn.method.budget import Budget
from lowrank_cnn.method.count import count
from lowrank_cnn.method.rewrite import copy_with, in_channels_last
from lowrank_cnn.method.schemes import build_conv, parse_scheme
from lowrank_cnn.method.select import check_rewritable, select

CLEARLY = 0.97
"""Times that differ by less than this are called equal: then thinner is advised, which is simpler."""
FILTER_MULTIPLE = 16
"""Kernels of most engines are made for multiples of this many filters."""
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
    options["padding_mode"] = conv.padding_mode
    strips = build_conv(
        conv.in_channels, conv.out_channels, conv.kernel_size, "lr", bias=conv.bias is not None, **options
    )
    height, width = conv.kernel_size
    fewer = max(1, round(conv.out_channels * (height + width) / 2 / (height * width)))
    numbers = {"thin": fewer, "thin, rounded up": min(conv.out_channels, round_up(fewer, FILTER_MULTIPLE))}
    thin = {
        name: nn.Conv2d(conv.in_channels, filters, (height, width), bias=conv.bias is not None, **options)
        for name, filters in numbers.items()
    }
    return {"dense": conv, "strips": strips, **thin}


def layer_advice(name: str, ms: Mapping[str, float]) -> LayerAdvice:
    """The form that is faster with as many MACs."""
    thin = min(time for form, time in ms.items() if form.startswith("thin"))
    told = f"strips take {ms['strips'] / ms['dense']:.2f} of its time, a thinner conv with as many MACs "
    told += f"{thin / ms['dense']:.2f}"
    faster = LOW_RANK if ms["strips"] < CLEARLY * thin else THINNER
    return LayerAdvice(name, ms["dense"], ms["strips"], thin, faster, told)


DENSE = "dense"
ENGINES = ("torch", "optimize", *FILE_ENGINES)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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
    placed = _checked(model, example)
    bench = AdviceBench(_unfrozen(model), example, engine, precision or "fp32", repeats)
    layers = bench.layers(placed)
    return _advice(bench, layers, *bench.forms(layers, budget.share))


def _checked(model: nn.Module, example: Tensor) -> nn.Module:
    """A copy of the network with the device and dtype of the example, which it takes."""
    check_rewritable(model)
    if any(tensor.is_meta for tensor in (example, *model.parameters())):
        raise LowRankError("on the meta device nothing takes time: put network and example on a real one.")
    placed = copy_with(model).to(example.device, example.dtype).eval()
    size = "x".join(map(str, example.shape))
    with explained(f"the network does not take an example of {size}"), torch.no_grad(), unchanged(placed):
        placed(*copied(example))
    return placed


def _unfrozen(model: nn.Module) -> nn.Module:
    """A copy without frozen weights: every form is to be trained from scratch."""
    new = copy_with(model)
    for parameter in new.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return new


@dataclass(frozen=True)
class AdviceBench:
    """Measures layers and networks on one example, in one engine."""

    model: nn.Module
    example: Tensor
    engine: str
    precision: str
    repeats: int

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.example.shape[1:])

    def times(self, networks: Mapping[str, nn.Module], example: Tensor) -> dict[str, Sample]:
        """Milliseconds of several networks on one example, in turns."""
        runs, (example,) = {}, copied(example)
        for name, network in networks.items():
            run = self._prepared(network, example)
            runs[name] = lambda run=run: run(example)
        with torch.no_grad():
            return measure(runs, repeats=self.repeats, budget=2.0, cuda=example.is_cuda)

    def _prepared(self, network: nn.Module, example: Tensor) -> Callable[[Tensor], Any]:
        placed: nn.Module = copy_with(network).to(example.device, example.dtype).eval()
        if self.engine == "torch":
            return in_channels_last(placed)
        if self.engine == "optimize":
            return optimize(placed, example, compile=False, cache=False, repeats=3)
        with tempfile.TemporaryDirectory() as scratch:
            strips = FILE_ENGINES[self.engine].strips and has_strips(placed)
            path = write_to_time(placed, self.engine, self.precision, example, Path(scratch), strips=strips)
            runner = open_engine(path, threads=torch.get_num_threads(), trusted=True)
        array = example.contiguous().numpy()
        return lambda _: runner(array)

    def layers(self, placed: nn.Module) -> tuple[LayerAdvice, ...]:
        """Every spatial conv as it is, as strips, and thinner; `placed` is the network as the example wants it."""
        convs, _ = select(placed, parse_scheme("lr"))
        with torch.no_grad():
            seen = layer_inputs(placed, list(convs), self.example)
        found = []
        for name, conv in convs.items():
            if conv.groups != 1 or name not in seen:
                continue
            x = seen[name].contiguous(memory_format=torch.channels_last)
            step(f"{name}, layer {len(found) + 1}")
            times = self.times(variants_of(conv), x)
            found.append(layer_advice(name, {key: one.ms for key, one in times.items()}))
        return tuple(found)

    def forms(
        self, layers: tuple[LayerAdvice, ...], share: float
    ) -> tuple[dict[str, tuple[MeasuredForm, nn.Module]], str]:
        """The forms within a share of the MACs, measured in turns beside the dense network.

        Also why the network cannot be made thinner, empty if it can.
        """
        strips = [row.name for row in layers if row.choice == LOW_RANK]
        networks, why = {DENSE: self.model}, ""
        for form in (LOW_RANK, THINNER, MIXED) if 0 < len(strips) < len(layers) else (LOW_RANK, THINNER):
            try:
                networks[form] = build_form(self.model, self.size, form, share, strips)
            except LowRankError as error:
                why = str(error).rstrip(".") if form == THINNER else why
        if len(networks) == 1:
            raise LowRankError(f"no form of this network reaches macs={share:g} here: {why}.")
        times, dense, rows = self.times(networks, self.example), count(self.model, self.size), {}
        for name, network in networks.items():
            ours, ms = count(network, self.size), times[name].ms
            shares = ours.macs / dense.macs, ours.params / dense.params
            rows[name] = MeasuredForm(name, *shares, ms, ms / times[DENSE].ms), network
        return rows, why


def _advice(
    bench: AdviceBench,
    layers: tuple[LayerAdvice, ...],
    forms: Mapping[str, tuple[MeasuredForm, nn.Module]],
    why_none: str,
) -> Advice:
    """The best form, and why, in one sentence or two."""
    rows = {name: form for name, (form, _) in forms.items() if name != DENSE}
    best = min(rows.values(), key=lambda form: form.time)
    # A thinner network is the simplest of all: another has to be clearly better.
    plain = rows.get(THINNER)
    if plain is not None and best.time >= CLEARLY * plain.time:
        best = plain
    if best.time > CLEARLY:
        best = forms[DENSE][0]
    others = "; ".join(f"{f.name} {f.time:.2f} of the time with {f.macs:.2f} of the MACs" for f in rows.values())
    says = {
        THINNER: "Make it thinner instead: low-rank filters are not faster here.",
        LOW_RANK: "Take low-rank filters.",
        MIXED: "Take low-rank filters in the layers listed as such, and make all layers thinner.",
        DENSE: "Leave it as it is: no cheaper form is faster here.",
    }[best.name]
    device = torch.cuda.get_device_name(bench.example.device) if bench.example.is_cuda else "cpu"
    kind = str(bench.example.dtype).removeprefix("torch.") if bench.precision == "fp32" else bench.precision
    verdict = f"{says} Measured on {device} in {bench.engine}, {kind}: {others}."
    if plain is None:
        verdict += f" No thinner network was measured: {why_none}."
    network = forms[best.name][1]
    return Advice(verdict, best.name, network, layers, tuple(f for f, _ in forms.values()), device, bench.engine)
