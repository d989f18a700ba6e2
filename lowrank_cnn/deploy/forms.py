"""The forms of a network that `optimize` tries: folded, fused, planned, compiled, recorded.

`Workshop.variants` lists them, the most promising first. Each is compared as a whole with the network that was
given, in the form in which it will run, before it is timed. One that fails or differs is left out, and the report
says why.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.block_planner import objection_on
from lowrank_cnn.deploy.blocks import as_network, in_blocks
from lowrank_cnn.deploy.candidates import fused
from lowrank_cnn.deploy.layers_alone import time_layers
from lowrank_cnn.deploy.merging import merge
from lowrank_cnn.deploy.optimized import FORMATS, Form, Optimized, OptimizeReport, stop_compiler
from lowrank_cnn.deploy.planning import apply_ways, plan
from lowrank_cnn.kernels.autotune.compile_ahead import prepare
from lowrank_cnn.kernels.fusing import fuse_neighbours
from lowrank_cnn.kernels.mode import for_graphs
from lowrank_cnn.kernels.network_graph import CaptureError, layer_kind
from lowrank_cnn.method.rewriting import copy_with, in_channels_last
from lowrank_cnn.system.clock import OutOfTime, Sample, deadline, measure
from lowrank_cnn.system.compare import copied, unchanged
from lowrank_cnn.system.errors import LostDeviceError, LowRankError, first_line
from lowrank_cnn.system.history import GIVEN
from lowrank_cnn.system.progress import step
from lowrank_cnn.system.text import counted

LAST = "channels_last"
Make = Callable[[], nn.Module]
RESERVED = 0.2
"""No form is begun when less than this share of the budget is left."""
FOR_COMPILING = 0.5
"""The compiler is called around our kernels only with this share left: it takes a third of the budget."""
CLEARLY_FASTER = 0.8
"""A form below this share of the layers alone is not reached by a compiler that calls the same layers."""
AS_FAST = 1.01
"""A plan is taken if it is faster than the fused form by more than this: it takes longer to make again."""


@dataclass
class Workshop:
    """Makes the forms of one network for one example, and measures them."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    cache: str | Path | bool
    repeats: int
    budget: float
    ways: Mapping[str, str] | None = None
    neighbours: bool = False
    names: tuple[str, ...] = ()
    made: dict[str, Optimized] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)
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
        for name in names if self.on_gpu else self._without_compiler():
            if f"{name}, recorded" in self.made:  # which is the same, without launches
                continue
            if self.on_gpu and (reason := self._out_of_reach(name)):
                self.failed[name] = reason
            else:
                self.attempt_in_time(name)
        if compile and not self.on_gpu:  # compiling takes long: the network as it is, and the fastest so far
            times = self.times(3) if self.left_for_forms > 0 else {}
            best = min(times, key=lambda name: times[name].ms, default=GIVEN)
            bases = [f"folded, {LAST}", best, "folded, contiguous"]
            chosen = [f"{base}, compiled" for base in dict.fromkeys(bases)]
            for name in [name for name in chosen if name in names][:2]:
                self.attempt_in_time(name)
        step(f"{counted(len(self.made), 'variant')} in turns")
        times = self.times(self.repeats)
        return self.result(best_form({name: sample.ms for name, sample in times.items()}), times)

    def _without_compiler(self) -> Iterator[str]:
        """The forms of a CPU: a plan takes long to make, so the faster memory format is planned first."""
        names = self.form_names(compile=False)
        plans = [name for name in names if name.startswith("planned")]
        yield from (name for name in names if name not in plans)
        known = self.times(3) if len(plans) > 1 and self.left_for_forms > 0 else {}
        folded = {name: sample.ms for name, sample in known.items()}
        yield from sorted(plans, key=lambda name: folded.get(name.replace("planned", "folded"), float("inf")))

    def _out_of_reach(self, name: str) -> str:
        """Why a compiled form cannot win: the compiler calls the same layers, and these alone take too long."""
        kind, compiled, _ = name.partition(", compiled")
        if not compiled or kind not in ("folded", "merged") or set(self.made) <= {GIVEN}:
            return ""
        alone = self._layers_alone(kind)
        best, sample = min(self.times(3).items(), key=lambda item: item[1].ms)
        if sample.ms >= CLEARLY_FASTER * alone:
            return ""
        return f"not tried: its layers alone take {alone:.3g} ms, and {best} takes {sample.ms:.3g} ms"

    def _layers_alone(self, kind: str) -> float:
        """Milliseconds of the layers of a folded or merged network; 0 where they cannot be timed."""
        if kind not in self.alone:
            step(f"{kind}: the layers alone")
            form = Form(LAST if self.has_images else None)
            try:
                network = self.folded(form.layout, chains=kind == "merged")
                self.alone[kind] = time_layers(network, *form.laid_out(*self.inputs))
            except LostDeviceError:
                raise
            except Exception:  # no graph of these layers, or no memory for one
                self.alone[kind] = 0.0
        return self.alone[kind]

    def again(self, known: dict[str, float] | None, compile: bool) -> Optimized | None:
        """The form that was fastest before, made without the others; None where it no longer is faster."""
        choice = best_form(known) if known else None
        if known is None or choice not in self.form_names(compile):
            return None
        step(f"{choice}, as measured before")
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

    @property
    def left_for_forms(self) -> float:
        """Seconds in which forms can be made: some of the budget is left for timing them."""
        return self.began + (1 - RESERVED) * self.budget - time.perf_counter()

    def times(self, repeats: int) -> dict[str, Sample]:
        inputs = copied(*self.inputs)
        runs: dict[str, Callable[[], object]] = {
            name: lambda v=variant: v(*inputs) for name, variant in self.made.items()
        }
        budget = max(self.left, RESERVED * self.budget)
        with unchanged(*self.made.values()):
            return measure(runs, repeats=repeats, budget=budget, cuda=self.on_gpu, fewest=1)

    def form_names(self, compile: bool) -> list[str]:
        """The forms that apply here, the most promising first."""
        return [name for name, (_, form) in self.variants().items() if compile or not form.compiled]

    def attempt_in_time(self, name: str) -> None:
        """Make a form while the budget lasts; some of it is left for comparing and timing."""
        needed = FOR_COMPILING if name.startswith("fused, compiled") else RESERVED
        if name != GIVEN and self.left <= needed * self.budget:
            self.failed[name] = f"not tried: the budget of {self.budget:g} s was used up"
        else:
            self.attempt(name)

    def attempt(self, name: str) -> None:
        """Make a form and compare it with the network given; one that fails or differs is left out."""
        if name in self.made:
            return
        make, form = self.variants()[name]
        step(name)
        limit = float("inf") if name == GIVEN else self.left_for_forms
        try:
            with deadline(limit):
                network = make()
                if self.on_gpu and not form.compiled:
                    compile_kernels_of(network, form, self.inputs)
                variant = Optimized(network, form, self.names).prepare(*self.inputs)
                reason = "" if name == GIVEN else objection_on(variant, self.model, *self.inputs)
        except LostDeviceError:
            raise
        except OutOfTime:
            reason = f"stopped: the budget of {self.budget:g} s was used up"
            stop_compiler()
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
        return {
            "fused, recorded": (lambda: self.fused, recorded),
            **dense,
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
        if layout == LAST:
            return in_channels_last(network)
        return network if layout is None else network.to(memory_format=FORMATS[layout])  # type: ignore[call-overload]

    def planned(self, layout: str | None, *, graphs: bool = False) -> nn.Module:
        """The folded network, each block in its fastest way: called from Python, or in a CUDA graph."""
        if not graphs and (made := self.made.get(f"planned, {layout}")) is not None:
            return made.network
        network, images = self.folded(layout), Form(layout).laid_out(*self.inputs)
        if self.ways is not None:  # found before
            return apply_ways(network, images, self.ways, neighbours=self.neighbours) if self.ways else network
        options = {"cache": self.cache, "repeats": self.repeats}
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


def best_form(times: Mapping[str, float]) -> str:
    """The form of the least time; the fused one if a plan is not faster by more than timing noise.

    >>> best_form({"as given": 3.0, "fused, recorded": 1.005, "planned, recorded": 1.0})
    'fused, recorded'
    """
    best = min(times, key=lambda name: times[name])
    fused = best.replace("planned", "fused")
    return fused if times.get(fused, float("inf")) <= AS_FAST * times[best] else best


@torch.no_grad()
def compile_kernels_of(network: nn.Module, form: Form, inputs: tuple[Tensor, ...]) -> None:
    """Compile the kernels that a network needs on all cores; its first run would compile one after the other."""
    with for_graphs() if form.recorded else nullcontext(), unchanged(network):
        prepare(lambda: network(*form.laid_out(*copied(*inputs))))
