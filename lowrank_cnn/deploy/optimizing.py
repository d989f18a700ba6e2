"""The fastest network that can be made of a given one: fold, fuse, plan, lay out, compile, record, and measure.

`_variants` lists the forms that are tried, the most promising first. Each is compared as a whole with the network
that was given, in the form in which it will run, before it is timed. One that fails or differs is left out, and
the report says why.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.blocks import as_network, in_blocks
from lowrank_cnn.deploy.candidates import fused
from lowrank_cnn.deploy.examples import Example, by_position, unchanged
from lowrank_cnn.deploy.merging import merge
from lowrank_cnn.deploy.optimized import FORMATS, Form, Optimized, OptimizeReport
from lowrank_cnn.deploy.plan_cache import Cache, network_key
from lowrank_cnn.deploy.planning import apply_ways, check_ready, objection_on, plan, silent
from lowrank_cnn.kernels.fusing import fuse_neighbours
from lowrank_cnn.kernels.mode import for_graphs
from lowrank_cnn.kernels.network_graph import CaptureError, layer_kind
from lowrank_cnn.method.rewriting import copy_with
from lowrank_cnn.models.files import dtype_of
from lowrank_cnn.system.clock import Sample, check_repeats, measure
from lowrank_cnn.system.errors import LostDeviceError, LowRankError, first_line
from lowrank_cnn.system.history import GIVEN
from lowrank_cnn.system.provenance import note, notes

LAST = "channels_last"
_LARGEST_EXAMPLE = 2**28
"""Numbers in the largest example that a file may ask for."""
Make = Callable[[], nn.Module]


def optimize(
    model: nn.Module,
    example_input: Example,
    *,
    compile: bool = True,
    cache: str | Path | bool = True,
    repeats: int = 11,
    budget: float = 30.0,
    say: Callable[[str], None] | None = None,
) -> Optimized:
    """A network that computes what `model` does, in the form that is fastest for inputs like the example.

    Batch norms are folded, blocks are planned or fused, and the network is tried in both memory formats, through
    torch.compile, and on a GPU as a CUDA graph, which inputs of the example's size replay. The result is for
    inference. Its `report` has the time of every form; by these it is never slower than `model`.

    - `example_input`: an input, a tuple of all inputs by position, or a dictionary of all inputs by keyword. The
      result is called in the same way.
    - `compile`: whether torch.compile is tried, with the weights as constants.
    - `cache`: where choices and times are kept (True: the user's cache directory; False: nowhere). A network that
      was optimised before, on this machine and with these versions, is made again without trying all forms.
    - `budget`: seconds after which no further form is tried; the forms so far are still compared and timed.
    - `say`: is told what is under way (`say=print`).

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> fast = optimize(net, torch.randn(1, 3, 8, 8), compile=False, cache=False, repeats=3)
    >>> fast.report.choice in fast.report.times
    True
    """
    network, inputs, names = by_position(model, example_input)
    check_repeats(repeats)
    store = Cache.open(cache)
    with unchanged(network) as restored:
        check_ready(network, *inputs)
        key = network_key(network, inputs, compile)
        work = _Workshop(network, inputs, cache, repeats, budget, say or silent, names=names)
        best = restored(work.again(store.times(key), compile) or work.fastest(compile))
    if cache is not False and best.report.times:
        store = Cache.open(cache)  # a plan may have written its times meanwhile
        store.keep(key, {name: sample.ms for name, sample in best.report.times.items()})
        store.save()
    return _finished(best, model, inputs)


def reoptimize(model: nn.Module, chosen: Mapping[str, Any], example_input: Tensor | None = None) -> Optimized:
    """The form that `optimize` found before, made again without measuring; `chosen` is that of an `Optimized`.

    It is compared with `model` on this machine. Where it fails or differs, the network runs as given, and
    `report.failed` has the reason. `load` calls this for a file that was written from an optimised network.
    """
    try:
        form, ways = str(chosen["choice"]), {str(name): str(way) for name, way in chosen["ways"].items()}
        times = {str(name): Sample(float(ms), float(ms), float(ms), 0) for name, ms in chosen["times"].items()}
        x = _example(model, chosen) if example_input is None else example_input
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LowRankError("what was stored of the optimised network is damaged: optimise it again.") from error
    check_ready(model, x)
    work = _Workshop(model, (x,), False, 3, float("inf"), silent, ways, bool(chosen.get("neighbours")))
    if form in work.variants():
        work.attempt(form)
    else:
        work.failed[form] = f"there is no such form on {x.device.type}"
    if form not in work.made:
        work.attempt(GIVEN)
    best = work.result(form if form in work.made else GIVEN, times)
    return _finished(best, model, (x,), chosen)


def _finished(
    best: Optimized, model: nn.Module, inputs: tuple[Tensor, ...], chosen: Mapping[str, Any] | None = None
) -> Optimized:
    size = tuple(inputs[0].shape[1:]) if len(inputs) == 1 and not best.names else None
    note(best, input_size=size, training_card=notes(model).training_card)
    best.remember(model, inputs, chosen or _chosen(best, inputs[0]))
    return best


def _chosen(best: Optimized, x: Tensor) -> dict[str, Any]:
    """What `reoptimize` needs to make the same form again."""
    plans = (notes(part).plan for part in best.modules())
    plan = next((found for found in plans if found is not None), None)
    times = {name: sample.ms for name, sample in best.report.times.items()}
    ways, neighbours = (plan.ways, plan.neighbours) if plan else ({}, False)
    return {
        "choice": best.report.choice,
        "ways": ways,
        "neighbours": neighbours,
        "times": times,
        "input": [*x.shape],
    }


def _example(model: nn.Module, chosen: Mapping[str, Any]) -> Tensor:
    """Random images of the shape that a network was optimised for."""
    shape = [int(side) for side in chosen["input"]]
    if min(shape, default=0) < 1 or prod(shape) > _LARGEST_EXAMPLE:
        raise ValueError(shape)
    like = next(chain(model.parameters(), model.buffers()), torch.zeros(()))
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(like.device, dtype_of(model))


@dataclass
class _Workshop:
    """Makes the forms of one network for one example, and measures them."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    cache: str | Path | bool
    repeats: int
    budget: float
    say: Callable[[str], None]
    ways: Mapping[str, str] | None = None
    neighbours: bool = False
    names: tuple[str, ...] = ()
    made: dict[str, Optimized] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    @property
    def on_gpu(self) -> bool:
        return self.inputs[0].is_cuda

    @property
    def has_images(self) -> bool:
        """Whether an input has channels that can be laid out last."""
        return any(x.dim() == 4 for x in self.inputs)

    def fastest(self, compile: bool) -> Optimized:
        """Try every form that the budget allows, and give the one that takes the least time."""
        names = self.form_names(compile)
        for name in names if self.on_gpu else [name for name in names if not self.variants()[name][1].compiled]:
            if f"{name}, recorded" not in self.made:  # which is the same, without launches
                self.attempt_in_time(name)
        if compile and not self.on_gpu:  # compiling takes long: the network as it is, and the fastest so far
            times = self.times(3)
            bases = [f"folded, {LAST}", min(times, key=lambda name: times[name].ms), "folded, contiguous"]
            chosen = [f"{base}, compiled" for base in dict.fromkeys(bases)]
            for name in [name for name in chosen if name in names][:2]:
                self.attempt_in_time(name)
        self.say(f"{len(self.made)} variants in turns")
        times = self.times(self.repeats)
        return self.result(min(times, key=lambda name: times[name].ms), times)

    def again(self, known: dict[str, float] | None, compile: bool) -> Optimized | None:
        """The form that was fastest before, made without the others; None where it no longer is faster."""
        choice = min(known, key=lambda name: known[name]) if known else None
        if known is None or choice not in self.form_names(compile):
            return None
        self.say(f"{choice}, as measured before")
        for name in dict.fromkeys((GIVEN, choice)):
            self.attempt(name)
        if choice not in self.made:
            return None
        times = self.times(3)
        if times[choice].ms > times[GIVEN].ms:
            return None
        before = {name: Sample(ms, ms, ms, 0) for name, ms in known.items()}
        return self.result(choice, {**before, **times})

    def result(self, choice: str, times: dict[str, Sample]) -> Optimized:
        best = self.made[choice]
        best.report = OptimizeReport(choice, times, dict(self.failed))
        return best

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.began + self.budget - time.perf_counter()

    def times(self, repeats: int) -> dict[str, Sample]:
        runs: dict[str, Callable[[], object]] = {
            name: lambda v=variant: v(*self.inputs) for name, variant in self.made.items()
        }
        return measure(runs, repeats=repeats, budget=max(self.left, 3.0), cuda=self.on_gpu)

    def form_names(self, compile: bool) -> list[str]:
        """The forms that apply here, the most promising first."""
        return [name for name, (_, form) in self.variants().items() if compile or not form.compiled]

    def attempt_in_time(self, name: str) -> None:
        """Make a form while the budget lasts."""
        if name != GIVEN and self.left <= 0:
            self.failed[name] = f"not tried: the budget of {self.budget:g} s was used up"
        else:
            self.attempt(name)

    def attempt(self, name: str) -> None:
        """Make a form and compare it with the network given; one that fails or differs is left out."""
        if name in self.made:
            return
        make, form = self.variants()[name]
        self.say(name)
        try:
            variant = Optimized(make(), form, self.names).prepare(*self.inputs)
            reason = "" if name == GIVEN else objection_on(variant, self.model, *self.inputs)
        except LostDeviceError:
            raise
        except Exception as error:  # no compiler, say, or a network that waits for the device and has no graph
            if name == GIVEN:
                raise
            reason = first_line(error)
        if reason:
            self.failed[name] = reason
        else:
            self.made[name] = variant

    def variants(self) -> dict[str, tuple[Make, Form]]:
        """Every form by name: how its network is made, and how that is run."""
        given = {GIVEN: (lambda: copy_with(self.model), Form())}
        return given | (self._on_gpu() if self.on_gpu else self._on_cpu())

    def _on_cpu(self) -> dict[str, tuple[Make, Form]]:
        layouts = list(FORMATS) if self.has_images else ["contiguous"]
        found: dict[str, tuple[Make, Form]] = {}
        for layout in layouts:
            found[f"folded, {layout}"] = (lambda at=layout: self.folded(at), Form(layout))
            found[f"planned, {layout}"] = (lambda at=layout: self.planned(at), Form(layout))
        for layout in layouts[::-1]:
            for kind in ("folded", "planned"):
                make = self.folded if kind == "folded" else self.planned
                compiled = Form(layout, compiled=True)
                found[f"{kind}, {layout}, compiled"] = (lambda at=layout, make=make: make(at), compiled)
        return found

    def _on_gpu(self) -> dict[str, tuple[Make, Form]]:
        layout = LAST if self.has_images else None
        recorded, both = Form(layout, recorded=True), Form(layout, compiled=True, recorded=True)
        joined = any(layer_kind(part) == "chain" for part in self.model.modules())
        # With few images a launch takes longer than its work, and the dense conv of a chain is one launch.
        dense = {"merged, compiled, recorded": (lambda: self.folded(layout, chains=True), both)} if joined else {}
        return dense | {
            "fused, recorded": (lambda: self.fused, recorded),
            "folded, compiled, recorded": (lambda: self.folded(layout), both),
            "planned, recorded": (lambda: self.planned(layout, graphs=True), recorded),
            "fused, compiled, recorded": (lambda: self.fused, both),
            "folded, recorded": (lambda: self.folded(layout), recorded),
            "folded": (lambda: self.folded(layout), Form(layout)),
            "fused": (lambda: self.fused, Form(layout)),
            "folded, compiled": (lambda: self.folded(layout), Form(layout, compiled=True)),
        }

    @cached_property
    def merged(self) -> nn.Module:
        return merge(self.model, chains=False, example_input=self.inputs)

    @property
    def dense(self) -> nn.Module:
        return merge(self.model, chains=True, example_input=self.inputs)

    def folded(self, layout: str | None, *, chains: bool = False) -> nn.Module:
        """The network with its batch norms folded, and chains merged where asked, in a memory format."""
        network = (
            merge(self.model, chains=True, example_input=self.inputs) if chains else copy.deepcopy(self.merged)
        )
        return network if layout is None else network.to(memory_format=FORMATS[layout])  # type: ignore[call-overload]

    def planned(self, layout: str | None, *, graphs: bool = False) -> nn.Module:
        """The folded network, each block in its fastest way: called from Python, or in a CUDA graph."""
        if not graphs and (made := self.made.get(f"planned, {layout}")) is not None:
            return made.network
        name = f"planned, {layout}"
        network, images = self.folded(layout), Form(layout).laid_out(*self.inputs)
        if self.ways is not None:  # found before
            return apply_ways(network, images, self.ways, neighbours=self.neighbours) if self.ways else network
        options = {"cache": self.cache, "repeats": self.repeats, "say": lambda text: self.say(f"{name}: {text}")}
        if not graphs:
            return plan(network, images, **options)  # type: ignore[arg-type]
        with for_graphs():
            return plan(network, images, **options)  # type: ignore[arg-type]

    @cached_property
    def fused(self) -> nn.Module:
        """The folded network with every block, pool and response norm by the kernels that know it."""
        folded = self.folded(LAST if self.has_images else None)
        try:
            network, blocks, captured = in_blocks(folded, *Form(LAST).laid_out(*self.inputs))
        except CaptureError as why:
            raise LowRankError(f"nothing is fused: {why}.") from why
        for block in blocks:
            if (way := fused(block)) is not None:
                network.set_submodule(block.name, way.eval())
        fuse_neighbours(network)
        return as_network(network, captured, folded)
