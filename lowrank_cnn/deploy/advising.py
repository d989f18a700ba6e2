"""`design`: how to make a network cheaper on this machine: with low-rank filters, thinner, or both.

Multiply-accumulates do not tell. A 3x3 conv may run by Winograd's algorithm and strips may not; a kernel may like
strips. So every layer is measured in both forms, with the same MACs: strips (kx1 and 1xk), and a dense conv with
fewer filters. The layer is advised to take the faster one. With images and targets, what each form would lose
counts as well. Then whole networks within the budget are measured in turns: low-rank, thinner, and mixed, in which
each layer has what it was advised to have.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.engines import open_engine
from lowrank_cnn.deploy.engines.choosing import engine_for
from lowrank_cnn.deploy.engines.targets import TARGETS
from lowrank_cnn.deploy.exporting import export
from lowrank_cnn.deploy.layer_forms import (
    CLEARLY,
    LOW_RANK,
    THINNER,
    LayerAdvice,
    layer_advice,
    measured_damage,
    variants_of,
)
from lowrank_cnn.deploy.network_forms import MIXED, Build, form_builders, why_none
from lowrank_cnn.deploy.optimizing import optimize
from lowrank_cnn.deploy.quantizing import quantize
from lowrank_cnn.deploy.strips import has_strips
from lowrank_cnn.method.budget import Budget
from lowrank_cnn.method.counting import count
from lowrank_cnn.method.rewriting import copy_with, in_channels_last
from lowrank_cnn.method.scheme import parse_scheme
from lowrank_cnn.method.selection import check_rewritable, select
from lowrank_cnn.method.shape_damage import Damage
from lowrank_cnn.method.shape_network import layer_inputs
from lowrank_cnn.system.clock import Sample, measure
from lowrank_cnn.system.compare import copied, unchanged
from lowrank_cnn.system.errors import LowRankError, first_line, nearest
from lowrank_cnn.system.progress import progress, step
from lowrank_cnn.system.text import text_table

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
