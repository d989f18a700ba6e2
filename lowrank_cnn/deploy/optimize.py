"""The fastest network that can be made of a given one: fold, fuse, plan, lay out, compile, record, and measure.

`deploy.forms` has the forms that are tried. What was found is kept in a cache, and can be made again from a file.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.clock import OutOfTime, Sample, check_budget, check_repeats, deadline, measure
from lowrank_cnn.core.compare import copied, unchanged
from lowrank_cnn.core.errors import LostDeviceError, LowRankError, first_line
from lowrank_cnn.core.modules import first_input, has_hooks
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.core.text import counted
from lowrank_cnn.deploy.block_forms import fused
from lowrank_cnn.deploy.blocks import as_network, in_blocks
from lowrank_cnn.deploy.plan import GIVEN, Cache, apply_ways, check_ready, network_key, objection_on, plan
from lowrank_cnn.graph.capture import CaptureError, layer_kind
from lowrank_cnn.graph.examples import Example, by_position, in_order
from lowrank_cnn.graph.fuse import fuse_neighbours
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.kernels.autotune.choice import prepare
from lowrank_cnn.kernels.cuda_graph import Recorded, captured, recorded
from lowrank_cnn.kernels.device import for_graphs
from lowrank_cnn.method.rewrite import copy_with, in_channels_last
from lowrank_cnn.models.network_file import dtype_of

# A network in the form that `optimize` found fastest: laid out, compiled, recorded, or as it was.

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class OptimizeReport:
    """Every variant's time, those that were left out with the reason, and the name of the fastest."""

    choice: str
    times: dict[str, Sample]
    failed: dict[str, str]

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)


@dataclass(frozen=True)
class Form:
    """How a network is run: in which memory format (None: as inputs come), compiled, recorded as a CUDA graph."""

    layout: str | None = None
    compiled: bool = False
    recorded: bool = False

    def laid_out(self, *inputs: Any) -> tuple[Any, ...]:
        """Inputs in the memory format of the network; one that is no batch of images stays as it is."""
        return tuple(map(self._in_format, inputs))

    def _in_format(self, x: Any) -> Any:
        if self.layout is None or not isinstance(x, Tensor) or x.dim() != 4:
            return x
        return x.contiguous(memory_format=FORMATS[self.layout])


class Optimized(nn.Module):
    """A network for inference in its fastest form; inputs are brought into its memory format.

    It is called as the example was given: with one input, with several, or by the keywords `names`.
    Where it was recorded, inputs of that size replay a CUDA graph, without launches; others run kernel by kernel.
    Where it was compiled, `network` is still the module that was compiled: a tracer and an export see it.
    `chosen` has what `optimize` found in values that JSON can hold.
    """

    report: OptimizeReport
    given: nn.Module | None
    example: tuple[Tensor, ...]
    chosen: dict[str, Any]

    def __init__(self, network: nn.Module, form: Form, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.network, self.form, self.names = network, form, names
        self.recording: Recorded | None = None
        self.__dict__["given"] = None  # known, but no part: it would have all weights once more
        self._compiled_run: Callable[..., Any] | None = None
        note(self, optimized=True)
        self.eval()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The network's results. A recorded run skips what torch does around a forward: it would take as long."""
        recording = self.recording
        if recording is None or len(args) != 1 or kwargs or has_hooks(self) or not recording.takes(args[0]):
            return super().__call__(*args, **kwargs)
        return recording(args[0])

    @torch.no_grad()
    def forward(self, x: Any = None, *more: Any, **named: Any) -> Any:
        inputs = in_order(self.names, named) if named else (x, *more)
        if self.recording is not None and len(inputs) == 1 and self.recording.takes(*inputs):
            return self.recording(*inputs)
        return self._run(*self.form.laid_out(*inputs))

    def prepare(self, *inputs: Tensor) -> Optimized:
        """Compile and record it for inputs like these, so that it fails here if it does."""
        inputs = copied(*inputs)
        with unchanged(self.network):
            self(*inputs)
            if self.form.recorded:
                if len(inputs) > 1:
                    raise LowRankError("a CUDA graph is recorded for networks of one input.")
                with torch.inference_mode(False), torch.no_grad():
                    self.recording = recorded(self._run, *self.form.laid_out(*inputs))
        return self

    def remember(self, given: nn.Module, inputs: tuple[Tensor, ...], chosen: Mapping[str, Any]) -> None:
        """Keep the network and the inputs that it was made for, and what was chosen: `export` writes these."""
        self.__dict__.update(given=given, example=inputs, chosen=dict(chosen))

    def _run(self, *inputs: Any) -> Any:
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        return self.network(*inputs) if traced or not self.form.compiled else self._through_compiler(*inputs)

    def _through_compiler(self, *inputs: Any) -> Any:
        """Compiled with its weights as constants, which the compiler folds and lays out ahead."""
        if self._compiled_run is None:
            # Known, but no part: torch makes a module of it, which would have all weights once more.
            self.__dict__["_compiled_run"] = torch.compile(_function_of(self.network), dynamic=False)
        assert self._compiled_run is not None
        import torch._inductor.config as inductor

        with inductor.patch(freezing=True):  # a size that is new compiles here
            return self._compiled_run(*inputs)

    # A graph is bound to its memory, and compiled code holds weights. Copies start anew. Where weights move or are
    # loaded, the network runs as it is: torch would find the compiled code of the old ones again.
    def forget(self) -> None:
        """Run the network as it is from now on, neither compiled nor recorded."""
        self.recording, self.form, self.__dict__["given"] = None, Form(self.form.layout), None
        self.__dict__["_compiled_run"] = None

    def _weights(self) -> list[tuple[int, torch.dtype, torch.device]]:
        tensors = (*self.parameters(), *self.buffers())
        return [(tensor.data_ptr(), tensor.dtype, tensor.device) for tensor in tensors]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "recording": None, "_compiled_run": None, "given": None}

    def _apply(self, fn: Any, recurse: bool = True) -> Optimized:
        before = self._weights()
        super()._apply(fn, recurse)
        if self._weights() != before:
            self.forget()
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights; from then on the network runs as it is, neither compiled nor recorded."""
        self.forget()
        return super().load_state_dict(*args, **kwargs)


def stop_compiler() -> None:
    """Cancel what waits for Inductor's threads once a compilation is stopped: it would disturb what is timed."""
    inductor: Any = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:
        with suppress(Exception):  # no threads, or another version's
            inductor.AsyncCompile.pool().shutdown(wait=False, cancel_futures=True)
            inductor.AsyncCompile.pool.cache_clear()


def _function_of(network: nn.Module) -> Callable[..., Any]:
    """A call of the network as a function with code of its own.

    Torch keeps at most eight compilations per piece of code, and then runs it as it is. Networks of one class
    share the code of their forward, and would use these up.
    """

    def run(*inputs: Any) -> Any:
        return network(*inputs)

    code = run.__code__.replace(co_name=f"optimized_{id(network)}")
    return FunctionType(code, run.__globals__, run.__name__, run.__defaults__, run.__closure__)


# How long the layers of a network take alone on a GPU. A compiler that calls the same layers is hardly faster.

Call = tuple[nn.Module, Tensor]


def time_layers(network: nn.Module, *inputs: Any, repeats: int = 5) -> float:
    """Milliseconds of all convs, linear layers and composites, one after the other in one CUDA graph.

    A pass over the maps of each is included: the compiler writes one for the bias, sum or ReLU that follows.
    """
    calls = layer_calls(network, *inputs)
    with torch.inference_mode(False), torch.no_grad():
        graph = captured(lambda: [_and_one_pass(layer(x)) for layer, x in calls])
    return measure({"layers": graph.replay}, repeats=repeats, cuda=True)["layers"].ms


def _and_one_pass(maps: Tensor) -> Tensor:
    return maps.relu() if maps.dim() == 4 else maps


def layer_calls(network: nn.Module, *inputs: Any) -> list[Call]:
    """Every call of a layer with an input of the size that it gets; calls of one size share their input."""
    shared: dict[Any, Tensor] = {}
    calls: list[Call] = []

    def note_call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_input(args, kwargs)
        kind = (x.shape, x.dtype, x.stride())
        if kind not in shared:
            shared[kind] = torch.zeros_like(x)
        calls.append((layer, shared[kind]))

    hooks = [layer.register_forward_pre_hook(note_call, with_kwargs=True) for layer in _outermost(network)]
    try:
        with torch.no_grad():
            network(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _outermost(network: nn.Module) -> list[nn.Module]:
    """The layers of a network; what is inside one is part of it."""
    if layer_kind(network) is not None:
        return [network]
    return [layer for part in network.children() for layer in _outermost(part)]


# The forms of a network that `optimize` tries: folded, fused, planned, compiled, recorded.
#
# `Workshop.variants` lists them, the most promising first. Each is compared as a whole with the network that was
# given, in the form in which it will run, before it is timed. One that fails or differs is left out, and the
# report says why.

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


_LARGEST_EXAMPLE = 2**28
"""Numbers in the largest example that a file may ask for."""


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
    """A network that computes what `model` does, in the form that is fastest for inputs like the example.

    Batch norms are folded, blocks are planned or fused, and the network is tried in both memory formats, through
    torch.compile, and on a GPU as a CUDA graph, which inputs of the example's size replay. The result is for
    inference. Its `report` has the time of every form; by these it is never slower than `model`.

    - `example_input`: an input, a tuple of all inputs by position, or a dictionary of all inputs by keyword. The
      result is called in the same way. It follows the path of `model` for other inputs by position, other sizes
      and other dtypes too; other keywords are refused.
    - `compile`: whether torch.compile is tried, with the weights as constants.
    - `cache`: where choices and times are kept (True: the user's cache directory; False: nowhere). A network that
      was optimised before, on this machine and with these versions, is made again without trying all forms.
    - `budget`: seconds for all forms. The last fifth is for timing: a form that is not ready by then is stopped,
      which needs the main thread. On a GPU torch.compile is left out where the layers it would call take longer
      alone than the best form so far.
    - `say`: a function that is called with each step (`say=print`), in place of the line on standard error.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> fast = optimize(net, torch.randn(1, 3, 8, 8), compile=False, cache=False, repeats=3)
    >>> fast.report.choice in fast.report.times
    True
    """
    network, inputs, names = by_position(model, example_input)
    check_repeats(repeats)
    check_budget(budget)
    store = Cache.open(cache)
    with progress("optimize", say):
        if any(isinstance(x, Tensor) and x.is_cuda for x in inputs) and not network.training:
            compile_kernels_of(network, Form(), inputs)
        check_ready(network, *inputs)
        key = network_key(network, inputs, compile)
        work = Workshop(network, inputs, cache, repeats, budget, names=names)
        best = work.again(store.times(key), compile) or work.fastest(compile)
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
    work = Workshop(model, (x,), False, 3, float("inf"), ways, bool(chosen.get("neighbours")))
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
