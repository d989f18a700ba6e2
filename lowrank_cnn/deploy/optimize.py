"""Find the fastest form of a network: fold, fuse, plan, lay out, compile, record, and measure.

`FormSearch` builds the forms of a network, the most promising first, and compares each as a whole with the given
network. The choice is kept in a cache, and can be rebuilt from a file.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib import import_module
from itertools import chain, product
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.clock import OutOfTime, Sample, check_budget, check_repeats, measure
from lowrank_cnn.core.compare import copied, unchanged
from lowrank_cnn.core.errors import LowRankError, LowRankWarning
from lowrank_cnn.core.modules import has_hooks
from lowrank_cnn.core.notes import AsDict, note, notes
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.core.search import RESERVED, Search
from lowrank_cnn.core.text import counted, text_table
from lowrank_cnn.deploy.blocks import as_network, fused, in_blocks
from lowrank_cnn.deploy.plan import GIVEN, apply_ways, check_ready, network_key, objection_on, open_times, plan
from lowrank_cnn.graph.bands import fused_bands, split_as_composite
from lowrank_cnn.graph.capture import layer_kind
from lowrank_cnn.graph.examples import Example, by_position, in_order
from lowrank_cnn.graph.fuse import fuse_neighbours, shared_copy
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.kernels.autotune.choice import prepare
from lowrank_cnn.kernels.cuda_graph import Recorded, recorded
from lowrank_cnn.kernels.device import for_graphs
from lowrank_cnn.method.rewrite import copy_with, in_channels_last
from lowrank_cnn.models.network_file import dtype_of

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CONTIGUOUS, LAST = FORMATS
FOLDED, MERGED, FUSED, PLANNED = "folded", "merged", "fused", "planned"


@dataclass(frozen=True)
class Form:
    """A form of a network: how it is rewritten, its memory format (None: the one of the device), and how it runs.

    >>> str(Form(PLANNED, LAST, compiled=True))
    'planned, channels_last, compiled'
    """

    network: str = GIVEN
    layout: str | None = None
    compiled: bool = False
    recorded: bool = False

    def __str__(self) -> str:
        ways = {self.network: True, self.layout: True, "compiled": self.compiled, "recorded": self.recorded}
        return ", ".join(name for name, taken in ways.items() if name and taken)


ON_CPU = [Form(network, layout, compiled) for compiled, layout, network in
          product((False, True), FORMATS, (FOLDED, PLANNED))]  # fmt: skip
ON_GPU = [
    Form(FUSED, recorded=True),
    Form(PLANNED, recorded=True),
    Form(FUSED, compiled=True, recorded=True),
    # With few images a launch takes longer than its work, and the dense conv of a chain is one launch.
    Form(MERGED, compiled=True, recorded=True),
    Form(FOLDED, compiled=True, recorded=True),
    Form(FUSED),  # of networks that no graph can record
    Form(FOLDED, compiled=True),
]
"""The forms of each device, those of a GPU in the order in which they are tried."""


@dataclass(frozen=True)
class OptimizeReport(AsDict):
    """Every form's time, the reasons for forms left out, and the name of the fastest."""

    choice: str
    times: dict[str, Sample]
    failed: dict[str, str]

    def __repr__(self) -> str:
        """The forms and their times, the fastest first, then those that failed."""
        timed = sorted(self.times.items(), key=lambda item: item[1].ms)
        rows = [(form, f"{time.ms:.3f} ms", "*" * (form == self.choice)) for form, time in timed]
        rows += [(form, "", why) for form, why in self.failed.items()]
        return text_table(("form", ">time", "taken"), rows)


def laid_out(layout: str | None, *inputs: Any) -> tuple[Any, ...]:
    """Batches of images in a memory format; other inputs stay as they are."""
    if layout is None:
        return inputs
    images = [isinstance(x, Tensor) and x.dim() == 4 for x in inputs]
    pairs = zip(inputs, images, strict=True)
    return tuple(x.contiguous(memory_format=FORMATS[layout]) if image else x for x, image in pairs)


class Optimized(nn.Module):
    """A network for inference in its fastest form; inputs are brought into its memory format.

    It is called as the example was given: with one input, with several, or by the keywords `names`. A recorded
    network replays a CUDA graph for inputs of that size; other inputs run kernel by kernel. `network` stays the
    uncompiled module, for tracers and exports. `chosen` has the result of `optimize` as JSON values.
    """

    report: OptimizeReport
    given: nn.Module | None
    example: tuple[Tensor, ...]
    chosen: dict[str, Any]

    def __init__(
        self, network: nn.Module, layout: str | None = None, *, compiled: bool = False, names: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.network, self.layout, self.compiled, self.names = network, layout, compiled, names
        self.recording: Recorded | None = None
        self.__dict__["given"] = None  # not a submodule, which would register all weights twice
        self._compiled_run: Callable[..., Any] | None = None
        note(self, optimized=True)
        self.eval()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The network's results. A recorded run skips torch's work around a forward, which would take as long."""
        recording = self.recording
        if recording is None or len(args) != 1 or kwargs or has_hooks(self) or not recording.takes(args[0]):
            return super().__call__(*args, **kwargs)
        return recording(args[0])

    @torch.no_grad()
    def forward(self, x: Any = None, *more: Any, **named: Any) -> Any:
        inputs = in_order(self.names, named) if named else (x, *more)
        if self.recording is not None and len(inputs) == 1 and self.recording.takes(*inputs):
            return self.recording(*inputs)
        return self._run(*laid_out(self.layout, *inputs))

    def record(self, *inputs: Tensor) -> None:
        """Record a CUDA graph for inputs of this size."""
        if len(inputs) > 1:
            raise LowRankError("a CUDA graph is recorded for networks of one input.")
        with torch.inference_mode(False), torch.no_grad():
            self.recording = recorded(self._run, *laid_out(self.layout, *inputs))

    def _run(self, *inputs: Any) -> Any:
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        return self.network(*inputs) if traced or not self.compiled else self._through_compiler(*inputs)

    def _through_compiler(self, *inputs: Any) -> Any:
        """Compile with weights as constants, which the compiler folds and lays out ahead of time."""
        if self._compiled_run is None:
            # Not a submodule: torch returns a module, which would register all weights twice.
            self.__dict__["_compiled_run"] = torch.compile(_function_of(self.network), dynamic=False)
        assert self._compiled_run is not None
        import torch._inductor.config as inductor

        with inductor.patch(freezing=freezes(self.network)):  # a new size compiles here
            return self._compiled_run(*inputs)

    # A graph is bound to its memory, and compiled code contains weights, so copies are neither. When weights move
    # or are loaded, the network runs as it is: torch would reuse the code compiled for the old weights.
    def forget(self) -> None:
        """Run the network as it is from now on, neither compiled nor recorded."""
        self.recording, self.compiled = None, False
        self.__dict__.update(given=None, _compiled_run=None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "recording": None, "_compiled_run": None, "given": None}

    def _apply(self, fn: Any, recurse: bool = True) -> Optimized:
        def places() -> list[tuple[Any, ...]]:
            return [(t.data_ptr(), t.dtype, t.device) for t in (*self.parameters(), *self.buffers())]

        before = places()
        super()._apply(fn, recurse)
        if places() != before:
            self.forget()
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights; from then on the network runs as it is, neither compiled nor recorded."""
        self.forget()
        return super().load_state_dict(*args, **kwargs)


def freezes(network: nn.Module) -> bool:
    """Whether weights may be compiled as constants.

    On x86 CPUs torch 2.13 packs 1x1xk filters of volumes over one channel wrongly, and writes beyond its memory.
    """
    weights = (weight for weight in network.parameters() if weight.dim() == 5 and not weight.is_cuda)
    return not any(weight.shape[1:4].numel() == 1 < weight.shape[4] for weight in weights)


def _function_of(network: nn.Module) -> Callable[..., Any]:
    """Call the network by code of its own: torch compiles a code object eight times, and a class has only one."""

    def run(*inputs: Any) -> Any:
        return network(*inputs)

    code = run.__code__.replace(co_name=f"optimized_{id(network)}")
    return FunctionType(code, run.__globals__, run.__name__, run.__defaults__, run.__closure__)


def _stop_compiler() -> None:
    """Cancel the queued jobs of Inductor's threads once a compilation is stopped: they would disturb timings."""
    inductor: Any = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:
        with suppress(Exception):  # no threads, or another version's
            inductor.AsyncCompile.pool().shutdown(wait=False, cancel_futures=True)
            inductor.AsyncCompile.pool.cache_clear()


@cache
def ready_compiler(device: torch.device) -> None:
    """Let Inductor register its patterns at once: stopped half-way, it would refuse every later compilation."""
    with suppress(Exception):  # another version's
        passes = (
            import_module(f"torch._inductor.fx_passes.{name}") for name in ("freezing_patterns", "post_grad")
        )
        joint: Any = import_module("torch._inductor.fx_passes.joint_graph")
        for each in passes:
            each.lazy_init()
        joint.lazy_init(device)


FOR_COMPILING = 0.5
"""Compile around our kernels only with this share of the budget left: it takes a third of it."""


class FormSearch:
    """Build and measure the forms of one network for one example. `planner` makes the planned network."""

    def __init__(
        self, model: nn.Module, inputs: tuple[Tensor, ...], planner: Callable[..., nn.Module], *,
        names: tuple[str, ...] = (), compile: bool = True, budget: float = float("inf"),
    ) -> None:  # fmt: skip
        self.model, self.inputs, self.planner, self.names, self.compile = model, inputs, planner, names, compile
        self.on_gpu = inputs[0].is_cuda
        self.has_images = any(x.dim() == 4 for x in inputs)
        self.networks: dict[tuple[str, str | None], nn.Module] = {}
        self.search = Search[Form, Optimized](lambda made: objection_on(made, model, *inputs), budget=budget)

    def forms(self) -> dict[str, Form]:
        """The forms that apply here by name."""
        found = [form for form in (ON_GPU if self.on_gpu else ON_CPU) if self.compile or not form.compiled]
        if not self.on_gpu and not self.has_images:
            found = [form for form in found if form.layout == CONTIGUOUS]
        if not any(layer_kind(part) == "chain" for part in self.model.modules()):
            found = [form for form in found if form.network != MERGED]
        return {str(form): form for form in (Form(), *found)}

    def fastest(self, repeats: int) -> Optimized:
        """Try every form that the budget allows, and return the fastest."""
        self.take_given()
        for form in self._on_gpu() if self.on_gpu else self._on_cpu():
            self.attempt(form)
        step(f"{counted(len(self.search.made), 'variant')} in turns")
        times = self.times(repeats)
        return self.result(min(times, key=lambda form: times[form].ms), times)

    def again(self, known: Mapping[str, float], repeats: int = 3) -> Optimized | None:
        """Rebuild the form that was fastest before, without the others; None if it is no longer faster."""
        before = {form: known[name] for name, form in self.forms().items() if name in known}
        choice = min(before, key=lambda form: before[form], default=None)
        if choice is None:
            return None
        step(f"{choice}, as measured before")
        self.take_given()
        self.attempt(choice)
        if choice not in self.search.made:
            return None
        times = self.times(repeats)
        if times[choice].ms > times[Form()].ms:
            return None
        return self.result(choice, {form: Sample(ms, ms, ms, 0) for form, ms in before.items()} | times)

    def result(self, choice: Form, times: Mapping[Form, Sample]) -> Optimized:
        best = self.search.made[choice]
        if not all(times[form].steady for form in (choice, Form()) if form in times):
            told = "the machine is too busy to time networks well: optimize again while it is idle."
            warnings.warn(told, LowRankWarning, stacklevel=2)
        taken = {str(form): sample for form, sample in times.items()}
        failed = {str(form): why for form, why in self.search.failed.items()}
        best.report = OptimizeReport(str(choice), taken, failed)
        return best

    def take_given(self) -> None:
        """The network as given, the reference of all comparisons: it has no deadline."""
        if Form() not in self.search.made:
            step(GIVEN)
            self.search.made[Form()] = self.build(Form())

    def attempt(self, form: Form) -> None:
        """Build a form and compare it with the network given, while the budget lasts; a GPU's first one always."""
        if form in self.search.made:
            return
        step(str(form))
        if form.compiled and self.search.left > RESERVED * self.search.budget:
            ready_compiler(self.inputs[0].device)
        around_ours = form.network == FUSED and form.compiled
        reserved = None if form == ON_GPU[0] else FOR_COMPILING if around_ours else RESERVED
        self.search.attempt(form, partial(self.build, form), reserved=reserved)

    def build(self, form: Form) -> Optimized:
        """The network in a form. It is compiled and recorded here, so that failures appear here."""
        # On a GPU channels_last, which its kernels need.
        layout = LAST if self.on_gpu and self.has_images and form.network != GIVEN else form.layout
        made = Optimized(self.network(form.network, layout), layout, compiled=form.compiled, names=self.names)
        if self.on_gpu and not form.compiled:
            compile_kernels_of(made.network, laid_out(layout, *self.inputs), recorded=form.recorded)
        inputs = copied(*self.inputs)
        try:
            with unchanged(made.network):
                made(*inputs)
                if form.recorded:
                    made.record(*inputs)
        except OutOfTime:
            _stop_compiler()
            raise
        return made

    def network(self, kind: str, layout: str | None) -> nn.Module:
        """The rewritten network; forms that only run it differently share it."""
        if (kind, layout) not in self.networks:
            self.networks[kind, layout] = self._rewritten(kind, layout)
        return self.networks[kind, layout]

    def _rewritten(self, kind: str, layout: str | None) -> nn.Module:
        if kind == GIVEN:
            return copy_with(self.model)
        network = self._folded(chains=True) if kind == MERGED else copy.deepcopy(self._with_chains)
        if layout == LAST:
            network = in_channels_last(network)
        elif layout is not None:
            network = network.to(memory_format=FORMATS[layout])  # type: ignore[call-overload]
        images = laid_out(layout, *self.inputs)
        if kind == PLANNED:
            with for_graphs() if self.on_gpu else nullcontext():
                return self.planner(network, images)
        return fuse_blocks(network, images) if kind == FUSED else network

    @cached_property
    def _with_chains(self) -> nn.Module:
        return self._folded(chains=False)

    def _folded(self, *, chains: bool) -> nn.Module:
        # On a GPU the kernels run a split as one layer, which also takes the batch norm after it.
        model = shared_copy(self.model, split_as_composite) if self.on_gpu else self.model
        return merge(model, chains=chains, example_input=self.inputs)

    def _on_cpu(self) -> Iterator[Form]:
        """Folded in each memory format; then planned, which takes long, the faster format first; then compiled."""
        folded = [form for form in self.forms().values() if form.network == FOLDED and not form.compiled]
        yield from folded
        yield from (replace(form, network=PLANNED) for form in self._ranked(folded))
        if self.compile:
            bases = dict.fromkeys([folded[-1], *self._ranked(self.search.made)[:1], folded[0]])
            yield from [replace(form, compiled=True) for form in bases if form.network != GIVEN][:2]

    def _on_gpu(self) -> Iterator[Form]:
        for form in self.forms().values():
            if form != Form() and replace(form, recorded=True) not in self.search.made:  # which has fewer launches
                yield form

    def _ranked(self, forms: Iterable[Form]) -> list[Form]:
        """Forms by their time, if there is time to measure them; forms without a time come last."""
        forms = list(forms)
        known = self.times(3) if len(forms) > 1 and self.search.left > RESERVED * self.search.budget else {}
        return sorted(forms, key=lambda form: known[form].ms if form in known else float("inf"))

    def times(self, repeats: int) -> dict[Form, Sample]:
        """The times of all forms made so far, in turns, within what is left of the budget."""
        budget = max(self.search.left, RESERVED * self.search.budget)
        inputs = copied(*self.inputs)

        def clock(forms: Mapping[Form, Optimized]) -> dict[Form, Sample]:
            runs = {form: lambda made=made: made(*inputs) for form, made in forms.items()}
            with unchanged(*forms.values()):
                return measure(runs, repeats=repeats, budget=budget, cuda=self.on_gpu, fewest=1)

        return self.search.times(clock)


def fuse_blocks(model: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
    """The network with GPU kernels for every block, depthwise conv, pool and response norm that they support."""
    network, blocks, captured = in_blocks(shared_copy(model, fused_bands), *inputs)
    for name, block in blocks.items():
        if (way := fused(block)) is not None:
            network.set_submodule(name, way.eval())
    fuse_neighbours(network)
    return as_network(network, captured, model)


@torch.no_grad()
def compile_kernels_of(network: nn.Module, inputs: tuple[Tensor, ...], *, recorded: bool = False) -> None:
    """Compile the kernels that a network needs on all cores; its first run would compile one after the other."""
    with for_graphs() if recorded else nullcontext(), unchanged(network):
        prepare(lambda: network(*copied(*inputs)))


@unchanged()  # layers draw weights when they are built
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
    """A network equivalent to `model`, in the fastest form for inputs of the example's size.

    Batch norms are folded, blocks are planned or fused, and the network is tried in both memory formats, through
    torch.compile, and on a GPU as a CUDA graph, which inputs of the example's size replay. The result is for
    inference. Its `report` has the time of every form; by these times it is never slower than `model`.

    - `example_input`: an input, a tuple of all inputs by position, or a dictionary of all inputs by keyword. The
      result is called in the same way. It also computes the same as `model` for other positional inputs, sizes and
      dtypes; other keywords are refused.
    - `compile`: whether torch.compile is tried, with the weights as constants.
    - `cache`: where choices and times are kept (True: the user's cache directory; False: nowhere). A network that
      was optimised before, on this machine and with these versions, is made again without trying all forms.
    - `budget`: seconds for all forms. The last fifth is for timing: a form that is not ready by then is stopped,
      which needs the main thread. On a GPU the fused form is always tried: its kernels may have to be compiled.
    - `say`: a function that is called with each step (`say=print`), instead of the line on standard error.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> fast = optimize(net, torch.randn(1, 3, 8, 8), compile=False, cache=False, repeats=3)
    >>> fast.report.choice in fast.report.times
    True
    """
    network, inputs, names = by_position(model, example_input)
    check_repeats(repeats)
    check_budget(budget)
    store = open_times(cache)
    with progress("optimize", say):
        if any(isinstance(x, Tensor) and x.is_cuda for x in inputs) and not network.training:
            compile_kernels_of(network, inputs)
        check_ready(network, *inputs)
        key = network_key(network, inputs, compile)
        planner = partial(plan, cache=cache, repeats=repeats)
        search = FormSearch(network, inputs, planner, names=names, compile=compile, budget=budget)
        best = search.again(store.get(key) or {}) or search.fastest(repeats)
    store[key] = {name: sample.ms for name, sample in best.report.times.items()}
    store.save()
    return _finished(best, model, inputs)


_LARGEST_EXAMPLE = 2**28
"""Most values of an example that a file may request."""


def reoptimize(model: nn.Module, chosen: Mapping[str, Any]) -> Optimized:
    """Rebuild the form that `optimize` found before, without measuring; `chosen` is that of an `Optimized`.

    It is compared with `model` on this machine. If it fails or differs, the network runs as given, and
    `report.failed` has the reason. `load` calls this for a file that was written from an optimised network.
    """
    try:
        name, ways = str(chosen["choice"]), {str(block): str(way) for block, way in chosen["ways"].items()}
        times = {str(form): Sample(float(ms), float(ms), float(ms), 0) for form, ms in chosen["times"].items()}
        shape = [int(side) for side in chosen["input"]]
        if min(shape, default=0) < 1 or prod(shape) > _LARGEST_EXAMPLE:
            raise ValueError(shape)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LowRankError("the stored form of the optimised network is damaged: optimise it again.") from error
    like = next(chain(model.parameters(), model.buffers()), torch.zeros(()))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, dtype_of(model))
    check_ready(model, x)
    forms = FormSearch(model, (x,), partial(apply_ways, ways=ways))
    form = forms.forms().get(name)
    if form is not None and form != Form():
        forms.attempt(form)
    if form not in forms.search.made:
        form = Form()
        forms.take_given()
    best = forms.result(form, {})
    unknown = {} if name in forms.forms() else {name: f"there is no such form on {x.device.type}"}
    best.report = replace(best.report, times=times, failed=best.report.failed | unknown)
    return _finished(best, model, (x,), chosen)


def _finished(
    best: Optimized, model: nn.Module, inputs: tuple[Tensor, ...], chosen: Mapping[str, Any] | None = None
) -> Optimized:
    """Attach to the result what `export` writes: the network, the inputs it was made for, and the choice."""
    size = tuple(inputs[0].shape[1:]) if len(inputs) == 1 and not best.names else None
    note(best, input_size=size, training_card=notes(model).training_card)
    if chosen is None:  # the values that `reoptimize` needs to rebuild the same form
        found = next((plan for part in best.modules() if (plan := notes(part).plan) is not None), None)
        times = {name: sample.ms for name, sample in best.report.times.items()}
        ways = found.ways if found else {}
        chosen = {"choice": best.report.choice, "ways": ways, "times": times, "input": [*inputs[0].shape]}
    best.__dict__.update(given=model, example=inputs, chosen=dict(chosen))
    return best
