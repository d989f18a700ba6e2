"""`design`: how to make a network cheaper on this machine: with low-rank filters, thinner, or both.

Multiply-accumulates do not tell. A 3x3 conv may run by Winograd's algorithm and strips may not; a kernel may like
strips. So every layer is measured in both forms, with the same MACs: strips (kx1 and 1xk), and a dense conv with
fewer filters. The layer is advised to take the faster one. With images and targets, what each form would lose
counts as well. Then whole networks within the budget are measured in turns: low-rank, thinner, and mixed, in which
each layer has what it was advised to have.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowrank_cnn.choose.shape_costs import layer_inputs, shape_network
from lowrank_cnn.choose.shape_damage import Damage, damage_by_loss
from lowrank_cnn.core.clock import Sample, measure
from lowrank_cnn.core.compare import copied, unchanged
from lowrank_cnn.core.errors import LowRankError, LowRankWarning, first_line, nearest
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.core.text import text_table
from lowrank_cnn.deploy.block_forms import has_strips
from lowrank_cnn.deploy.choose_engine import engine_for
from lowrank_cnn.deploy.engines.targets import TARGETS, open_engine
from lowrank_cnn.deploy.export import export
from lowrank_cnn.deploy.optimize import optimize
from lowrank_cnn.deploy.quantize import quantize
from lowrank_cnn.method.budget import Budget
from lowrank_cnn.method.channels import free_routes
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.rewrite import copy_with, in_channels_last
from lowrank_cnn.method.schemes import build_conv, parse_scheme
from lowrank_cnn.method.select import check_rewritable, select
from lowrank_cnn.method.thin import thin
from lowrank_cnn.train.objective import class_scores

# One conv as strips and as a thinner dense conv with as many MACs: their times, and what each would lose.

LOW_RANK, THINNER = "low-rank", "thinner"
CLEARLY = 0.97
"""Times that differ by less than this are called equal: then thinner is advised, which is simpler."""
LIKED = 16
"""Kernels of most engines are made for multiples of this many filters."""


@dataclass(frozen=True)
class LayerAdvice:
    """One conv: milliseconds dense, as strips, and thinner with as many MACs; what each loses, where measured."""

    name: str
    dense_ms: float
    strips_ms: float
    thin_ms: float
    strips_lose: float | None
    thin_loses: float | None
    choice: str
    why: str


def variants_of(conv: nn.Conv2d) -> dict[str, nn.Module]:
    """A conv, its strips, and a dense conv with as many MACs as these; also with filters in a number that suits.

    Of 64 filters a third is 21, which may take longer than 32: a user would take those.
    """
    options: dict[str, Any] = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    options["padding_mode"] = conv.padding_mode
    strips = build_conv(
        conv.in_channels, conv.out_channels, conv.kernel_size, "lr", bias=conv.bias is not None, **options
    )
    height, width = conv.kernel_size
    fewer = max(1, round(conv.out_channels * (height + width) / 2 / (height * width)))
    numbers = {"thin": fewer, "thin, rounded up": min(conv.out_channels, -(-fewer // LIKED) * LIKED)}
    thin = {
        name: nn.Conv2d(conv.in_channels, filters, (height, width), bias=conv.bias is not None, **options)
        for name, filters in numbers.items()
    }
    return {"dense": conv, "strips": strips, **thin}


def layer_advice(name: str, ms: Mapping[str, float], damage: Mapping[str, Damage] | None) -> LayerAdvice:
    """The form that is faster with as many MACs or, where damage is known, that loses less in as much time."""
    thin = min(time for form, time in ms.items() if form.startswith("thin"))
    told = f"strips take {ms['strips'] / ms['dense']:.2f} of its time, a thinner conv with as many MACs "
    told += f"{thin / ms['dense']:.2f}"
    faster = LOW_RANK if ms["strips"] < CLEARLY * thin else THINNER
    row = LayerAdvice(name, ms["dense"], ms["strips"], thin, None, None, faster, told)
    if damage is None or name not in damage:
        return row
    strips, thinner = _losses(damage[name], min(1.0, ms["strips"] / ms["dense"]))
    choice = LOW_RANK if strips < thinner else THINNER
    why = f"at the time of strips, strips would lose {strips:.2f} and a thinner conv {thinner:.2f}"
    return replace(row, strips_lose=strips, thin_loses=thinner, choice=choice, why=why)


def _losses(damage: Damage, time: float) -> tuple[float, float]:
    """The shares lost by strips in all filters, and by removing the filters that matter least, at equal time."""
    strips = float(damage.shapes.min(1).values.sum()) / damage.whole
    removed = round((1 - time) * len(damage.removal))
    return strips, float(damage.removal.sort().values[:removed].sum()) / damage.whole


def measured_damage(
    model: nn.Module,
    example: Tensor,
    data: Iterable[tuple[Tensor, Tensor]],
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> dict[str, Damage]:
    """What strips and removals would lose in each layer, on batches of (images, targets)."""
    batches, size = list(data), tuple(example.shape[1:])
    if not batches or not all(isinstance(batch, tuple | list) and len(batch) == 2 for batch in batches):
        raise LowRankError("data has a few batches, each of (images, targets).")
    shaped = shape_network(model, parse_scheme("learned(kx1, 1xk, none)"), size)
    try:
        return damage_by_loss(shaped, free_routes(shaped, size), batches, loss or _cross_entropy)
    except LowRankError:
        raise
    except Exception as error:  # a loss of the user's own may fail in any way
        raise LowRankError(f"the loss cannot be computed on data: {first_line(error)}.") from error


def _cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(class_scores(outputs), targets)


# Whole networks within a share of the MACs: low-rank, thinner, and mixed, as advised layer by layer.

MIXED = "mixed"
_MULTIPLE = 8

Build = Callable[[float], nn.Module | None]
"""Makes a network for a share of the MACs, or None where none can be made."""


def form_builders(model: nn.Module, size: tuple[int, ...], layers: Sequence[LayerAdvice]) -> dict[str, Build]:
    """How each form is made for a share of the MACs; one that cannot be made gives None."""
    strips = [row.name for row in layers if row.choice == LOW_RANK]
    forms: dict[str, Build] = {
        LOW_RANK: lambda share: _low_rank(model, size, share, None),
        THINNER: lambda share: _thinner(model, size, share),
    }
    if 0 < len(strips) < len(layers):
        forms[MIXED] = lambda share: _low_rank(model, size, share, strips)
    return {name: _or_none(build) for name, build in forms.items()}


def _or_none(build: Build) -> Build:
    def made(share: float) -> nn.Module | None:
        with warnings.catch_warnings(action="ignore", category=LowRankWarning):  # forms are measured
            try:
                return build(share)
            except LowRankError:
                return None

    return made


def why_none(model: nn.Module, size: tuple[int, ...], share: float) -> str:
    """Why a network cannot be made thinner to a share of the MACs, which all forms come to; empty if it can."""
    try:
        _thinner(model, size, share)
    except LowRankError as error:
        return str(error).rstrip(".")
    return ""


def _low_rank(model: nn.Module, size: tuple[int, ...], share: float, where: list[str] | None) -> nn.Module:
    """Strips in all layers, or in some; where that does not save enough, all layers are thinner as well."""
    if where is None:
        try:
            return convert(model, "lr", macs=share, input_size=size)
        except LowRankError:
            pass
    cheaper = count(convert(model, "lr", where=where, input_size=size), size).macs / count(model, size).macs
    return convert(_thinner(model, size, min(1.0, share / cheaper)), "lr", where=where, input_size=size)


def _thinner(model: nn.Module, size: tuple[int, ...], share: float) -> nn.Module:
    """A thinner network of at most this share: `thin` gives the nearest, which may lie above."""
    allowed = share * count(model, size).macs
    for part in (1.0, 0.9, 0.7, 0.5, 0.3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LowRankWarning)  # whether the MACs will do is decided here
            found = thin(model, macs=part * share, input_size=size, multiple=_MULTIPLE)
        if count(found, size).macs <= allowed:
            return found
    raise LowRankError(f"no thinner network has {share:.3f} of the MACs.")


DENSE = "dense"
ENGINES = ("torch", "optimize", "auto", *TARGETS)
_STEPS = 5
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_IN_ENGINES = ("fp32", "fp16", "int8")


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
    """What to do, in `verdict`; `network` is that form with fresh weights, to be trained.

    Where no form is faster, the choice is "dense", and `network` a copy of the one given, with its weights.
    `layers` and `forms` are what was measured.
    """

    verdict: str
    choice: str
    network: nn.Module
    layers: tuple[LayerAdvice, ...]
    forms: tuple[MeasuredForm, ...]
    device: str
    engine: str

    def __str__(self) -> str:
        rows = [
            (r.name, f"{r.dense_ms:.3f}", f"{r.strips_ms:.3f}", f"{r.thin_ms:.3f}", r.choice, r.why)
            for r in self.layers
        ]
        layers = text_table(("layer", ">dense ms", ">strips ms", ">thin ms", "take", "why"), rows)
        forms = [(f.name, f"{f.macs:.3f}", f"{f.params:.3f}", f"{f.ms:.3f}", f"{f.time:.2f}") for f in self.forms]
        whole = text_table(("network", ">MACs", ">params", ">ms", ">of the time"), forms)
        return f"{layers}\n\n{whole}\n\n{self.verdict}"

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
    latency: float | None = None,
    data: Iterable[tuple[Tensor, Tensor]] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    engine: str = "torch",
    precision: str | None = None,
    repeats: int = 9,
) -> Advice:
    """Advise how to bring a network to a share of its MACs or time, by what is measured on this machine.

    >>> advice = design(net, torch.randn(1, 3, 64, 64), macs=0.4)  # doctest: +SKIP
    >>> print(advice)  # doctest: +SKIP

    - `example`: a batch like those that the network will run on. Its device and dtype are measured.
    - `macs` or `latency`: the share that is to be left. By `macs` the fastest form is advised, by `latency` the
      form that keeps most MACs within the time.
    - `data`: a few batches of (images, targets), for a trained network: what a form would lose then counts too, by
      `loss`, a function of outputs and targets (cross-entropy).
    - `engine`: "torch" as it is, "optimize" for the form that `optimize` finds, or an engine of `export`: "onnx",
      "openvino", "ncnn", "mnn"... "auto" takes the installed engine and precision (fp32 or fp16) that run the
      network fastest on the CPU.
    - `precision`: "fp32", "fp16" or "bf16" in place of the example's dtype; of engines "fp32", "fp16" or "int8",
      for which ranges come from random numbers: they are right for the time alone.
    """
    budget = Budget.of(macs=macs, latency=latency)
    if budget is None or budget.share == 1:
        raise LowRankError("design needs a budget below 1: macs=0.4 or latency=0.5, as a share of the network's.")
    if engine not in ENGINES:
        raise LowRankError(f"there is no engine {engine!r}; {nearest(engine, ENGINES)}")
    if not isinstance(example, Tensor) or example.dim() != 4 or not example.is_floating_point():
        raise LowRankError("the example is a batch of images in floating point, [N, channels, height, width].")
    (example,) = copied(example)
    if engine in ("torch", "optimize"):
        example, precision = example.to(_dtype(precision) or example.dtype), None
    elif precision not in (None, *_IN_ENGINES):
        raise LowRankError(f"engines run in {', '.join(_IN_ENGINES)}, not in {precision!r}.")
    placed = _checked(model, example)
    bench = AdviceBench(_unfrozen(model), example, *engine_for(placed, example, engine, precision), repeats)
    layers = bench.layers(placed, None if data is None else measured_damage(bench.model, example, data, loss))
    forms = bench.forms(layers, budget)
    return _advice(bench, layers, forms, budget)


def _checked(model: nn.Module, example: Tensor) -> nn.Module:
    """A copy of the network with the device and dtype of the example, which it takes."""
    check_rewritable(model)
    if any(tensor.is_meta for tensor in (example, *model.parameters())):
        raise LowRankError("on the meta device nothing takes time: put network and example on a real one.")
    placed = copy_with(model).to(example.device, example.dtype).eval()
    try:
        with torch.no_grad(), unchanged(placed):
            placed(*copied(example))
    except Exception as error:  # a forward may fail in any way of its own
        size = "x".join(map(str, example.shape))
        raise LowRankError(f"the network does not take an example of {size}: {first_line(error)}.") from error
    return placed


def _unfrozen(model: nn.Module) -> nn.Module:
    """A copy without frozen weights: every form is to be trained from scratch."""
    new = copy_with(model)
    for parameter in new.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return new


def _dtype(precision: str | None) -> torch.dtype | None:
    """The dtype that torch computes in; None if none is named."""
    if precision not in (None, *_DTYPES):
        raise LowRankError(f"torch runs in {', '.join(_DTYPES)}, not in {precision!r}: name an engine for int8.")
    return None if precision is None else _DTYPES[precision]


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
            target = TARGETS[self.engine]
            path = Path(scratch) / f"net{target.suffix}"
            if self.precision == "int8":
                quantize(placed, example, path, dynamic=())
            else:
                how: Any = {"precision": self.precision, "strips": target.strips and has_strips(placed)}
                export(placed, path, input_size=tuple(example.shape[1:]), **how)
            runner = open_engine(path, threads=torch.get_num_threads(), trusted=True)
        array = example.contiguous().numpy()
        return lambda _: runner(array)

    def layers(self, placed: nn.Module, damage: Mapping[str, Damage] | None) -> tuple[LayerAdvice, ...]:
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
            found.append(layer_advice(name, {key: one.ms for key, one in times.items()}, damage))
        return tuple(found)

    def forms(self, layers: tuple[LayerAdvice, ...], budget: Budget) -> dict[str, tuple[MeasuredForm, nn.Module]]:
        """The forms that reach the budget, measured in turns beside the dense network."""
        builders = form_builders(self.model, self.size, layers)
        if budget.kind == "macs":
            found = {name: build(budget.share) for name, build in builders.items()}
        else:
            found = {name: self._within_time(build, budget.share) for name, build in builders.items()}
        networks = {name: network for name, network in found.items() if network is not None}
        if not networks:
            why = why_none(self.model, self.size, budget.share)
            told = f"no form of this network reaches {budget.kind}={budget.share:g} here"
            raise LowRankError(f"{told}: {why}." if why else f"{told}.")
        times = self.times({DENSE: self.model, **networks}, self.example)
        return {
            name: (self._form(name, network, times), network)
            for name, network in {DENSE: self.model, **networks}.items()
        }

    def _within_time(self, build: Build, share: float) -> nn.Module | None:
        """The form with most MACs within a share of the time, by bisection."""
        low, high, best = 0.0, 1.0, None
        for _ in range(_STEPS):
            middle = (low + high) / 2
            network = build(middle)
            if network is None:
                low = middle
                continue
            times = self.times({DENSE: self.model, "form": network}, self.example)
            if times["form"].ms <= share * times[DENSE].ms:
                low, best = middle, network
            else:
                high = middle
        return best

    def _form(self, name: str, network: nn.Module, times: Mapping[str, Sample]) -> MeasuredForm:
        ours, dense = count(network, self.size), count(self.model, self.size)
        ms = times[name].ms
        return MeasuredForm(name, ours.macs / dense.macs, ours.params / dense.params, ms, ms / times[DENSE].ms)


def _advice(
    bench: AdviceBench,
    layers: tuple[LayerAdvice, ...],
    forms: Mapping[str, tuple[MeasuredForm, nn.Module]],
    budget: Budget,
) -> Advice:
    """The best form, and why, in one sentence or two."""
    rows = {name: form for name, (form, _) in forms.items() if name != DENSE}
    key = (lambda f: -f.time) if budget.kind == "macs" else (lambda f: f.macs)
    inside = [form for form in rows.values() if budget.kind == "macs" or CLEARLY * form.time <= budget.share]
    best = max(inside or rows.values(), key=key)
    # A thinner network is the simplest of all: another has to be clearly better.
    plain = rows.get(THINNER)
    if plain is not None and plain in inside and key(best) <= key(plain) + (1 - CLEARLY) * abs(key(plain)):
        best = plain
    if best.time > CLEARLY:
        best = forms[DENSE][0]
    others = "; ".join(f"{f.name} {f.time:.2f} of the time with {f.macs:.2f} of the MACs" for f in rows.values())
    worse = "low-rank filters are not faster" if budget.kind == "macs" else "low-rank filters keep no more MACs"
    says = {
        THINNER: f"Make it thinner instead: {worse} here.",
        LOW_RANK: "Take low-rank filters.",
        MIXED: "Take low-rank filters in the layers listed as such, and make all layers thinner.",
        DENSE: "Leave it as it is: no cheaper form is faster here.",
    }[best.name]
    device = torch.cuda.get_device_name(bench.example.device) if bench.example.is_cuda else "cpu"
    kind = str(bench.example.dtype).removeprefix("torch.") if bench.precision == "fp32" else bench.precision
    verdict = f"{says} Measured on {device} in {bench.engine}, {kind}: {others}."
    verdict += "" if inside else f" Measured once more, none is within {budget.share:g} of the time."
    if plain is None and (why := why_none(bench.model, bench.size, budget.share)):
        verdict += f" No thinner network was measured: {why}."
    network = forms[best.name][1]
    return Advice(verdict, best.name, network, layers, tuple(f for f, _ in forms.values()), device, bench.engine)
