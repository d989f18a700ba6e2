"""Measure, for each block of a network, the ways in which it can be run, and keep the fastest.

The network is captured as a graph of blocks and run once, call by call: each block is planned on the very tensors
that reach it, in the memory format that the choices before it leave. A way that fails or gives another output is
left out. At the end the whole network is compared with the one that was given, and timed against it; the given one
is returned where they differ or nothing was gained. Within `kernels.for_graphs` all is measured as CUDA graphs,
for a network that will be captured as one.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from lowrank_cnn.core import __version__
from lowrank_cnn.core.cache import JsonCache, cache_folder
from lowrank_cnn.core.clock import Sample, check_repeats, measure
from lowrank_cnn.core.compare import agree, copied, objection, unchanged
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LostDeviceError, LowRankError, first_line
from lowrank_cnn.core.notes import AsDict, note, notes
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.core.text import html_table, si, text_table
from lowrank_cnn.deploy.block_forms import CANDIDATES, Candidate
from lowrank_cnn.deploy.blocks import Block, BlockAsGiven, as_network, in_blocks
from lowrank_cnn.graph.capture import CaptureError
from lowrank_cnn.graph.examples import ByKeyword, Example, by_position, check_runs
from lowrank_cnn.graph.fuse import fuse_neighbours
from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.kernels.device import is_for_graphs
from lowrank_cnn.kernels.strips import installed_version
from lowrank_cnn.method.count import count
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.method.select import check_rewritable

GIVEN = "as given"
"""How a block runs that no other way is faster for."""


@dataclass(frozen=True)
class Decision:
    """A block: its epilogue, its multiply-accumulates for this input, the milliseconds of each way, the choice.

    `failed` says why other ways were left out.
    """

    name: str
    epilogue: str
    macs: int
    times: Mapping[str, float]
    choice: str
    failed: Mapping[str, str] = field(default_factory=dict)

    def refused(self, reason: str) -> Decision:
        """The same decision taken back, since with it the whole network fails or differs."""
        return replace(self, choice=GIVEN, failed={**self.failed, self.choice: reason})


@dataclass(frozen=True)
class NetworkPlan(AsDict):
    """All decisions, and the whole network before and after.

    `used` is False where the network was better as given, and `reason` says why nothing could be planned.
    `neighbours` is whether pools and response norms run by kernels too, on a GPU.
    """

    input: tuple[int, ...]
    device: str
    decisions: tuple[Decision, ...]
    before: Sample
    after: Sample
    used: bool
    reason: str = ""
    neighbours: bool = False

    @property
    def ways(self) -> dict[str, str]:
        """The blocks that run in another way than given, by name; none where the plan is not used."""
        return {row.name: row.choice for row in self.decisions if row.choice != GIVEN} if self.used else {}

    def __str__(self) -> str:
        """The decision table: for each block its MACs, the milliseconds of each way, and the one chosen."""
        if self.reason:
            return f"not planned: {self.reason}"
        table = text_table(*self._table())
        verdict = "the plan is used" if self.used else "nothing gained: as given"
        whole = f"whole network: {self.before.ms:.3f} ms before, {self.after.ms:.3f} after; {verdict}"
        notes = [f"{row.name}, {way}: {why}" for row in self.decisions for way, why in row.failed.items()]
        return "\n".join([table, *notes, whole])

    def _repr_html_(self) -> str:
        """The decision table that notebooks show."""
        if self.reason:
            return html_table(("plan",), [(f"not planned: {self.reason}",)])
        whole = (
            f"Milliseconds on {self.device}. Whole network: {self.before.ms:.3f} before, {self.after.ms:.3f} after"
        )
        return html_table(*self._table(), whole)

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        ways = list(dict.fromkeys(way for row in self.decisions for way in row.times))
        rows = [
            (
                row.name,
                si(row.macs),
                *(f"{row.times[way]:.3f}" if way in row.times else "" for way in ways),
                row.choice,
            )
            for row in self.decisions
        ]
        return ("block", ">MACs", *(f">{way}" for way in ways), "chosen"), rows


# Measured times on disk, found again by everything that they depend on.


@dataclass
class Cache:
    """Times of blocks and of whole networks, by `block_key` and `network_key`; without a path, nothing is kept.

    `taken` is how many were found; `blind`, it finds none, and what is measured replaces what it has.
    """

    entries: JsonCache
    taken: int = 0
    blind: bool = False

    @classmethod
    def open(cls, where: str | Path | bool) -> Cache:
        """True is the user's cache directory, False none; a damaged file counts as empty."""
        path = cache_folder() / "plans.json" if where is True else Path(where) if where else None
        return cls(JsonCache(path, key="plans", valid=_is_times))

    def times(self, key: str, ways: list[str] | None = None) -> dict[str, float] | None:
        """What was measured before; with `ways`, if it was measured for exactly these."""
        found = self.entries.get(key)
        if self.blind or not found or (ways is not None and set(found) != set(ways)):
            return None
        self.taken += 1
        return dict(found)

    def keep(self, key: str, times: dict[str, float]) -> None:
        """Remember what was measured."""
        self.entries[key] = times

    def save(self) -> bool:
        """Keep what was measured; False where it cannot be written, which costs the next plan its time."""
        return self.entries.save()


def _is_times(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    return all(isinstance(ms, int | float) and not math.isnan(ms) and ms >= 0 for ms in entry.values())


def block_key(block: Block, inputs: Sequence[Tensor]) -> str:
    """Everything that the times of a block depend on: machine, versions, threads, layer, epilogue and inputs."""
    return _key("block", str(block), inputs, is_for_graphs())


def network_key(network: nn.Module, inputs: Sequence[Tensor], *options: object) -> str:
    """Everything that the times of a whole network depend on: its structure instead of one layer's."""
    return _key("network", f"{type(network).__qualname__} {network}", inputs, *options)


def _key(kind: str, what: str, inputs: Sequence[Tensor], *options: object) -> str:
    where = [_machine(), torch.get_num_threads(), str(inputs[0].device)]
    text = json.dumps([__version__, kind, where, [_described(x) for x in inputs], what, list(map(str, options))])
    return hashlib.sha256(text.encode()).hexdigest()


def _described(x: Tensor) -> list[object]:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return [str(x.dtype), list(x.shape), last]


@cache
def _machine() -> str:
    known = environment()
    return str([*(known[name] for name in ("torch", "triton", "cudnn", "gpu", "cpu")), installed_version()])


# Decide for each block of a network how it runs: measure every candidate on the tensors that reach the block.
#
# The network runs once, call by call. A candidate that fails or gives another output is left out; of the others,
# the fastest replaces the block as given where it gains enough.

_GAIN = 0.97
"""A block is run in another way only if that takes at most so much of the time: less is noise."""


@torch.no_grad()
def timed(modules: Mapping[str, nn.Module], inputs: tuple[Tensor, ...], repeats: int) -> dict[str, Sample]:
    """Several modules on the same inputs, in turns; within `for_graphs` as CUDA graphs."""
    inputs = copied(*inputs)
    runs: dict[str, Callable[[], object]] = {name: lambda m=m: m(*inputs) for name, m in modules.items()}
    with unchanged(*modules.values()):
        if not inputs[0].is_cuda:
            return measure(runs, repeats=repeats)
        with torch.cuda.device(inputs[0].device):
            if is_for_graphs():
                runs = {name: captured(run).replay for name, run in runs.items()}
            return measure(runs, repeats=repeats, cuda=True)


def objection_on(ours: nn.Module, given: nn.Module, *inputs: Tensor) -> str:
    """Why a rewritten network differs from the original, empty if it agrees. A GPU may multiply by TF32."""
    return objection(ours, given, *inputs, single=1e-2 if inputs[0].is_cuda else 1e-3)


_Found = tuple[dict[str, nn.Module], dict[str, str], dict[str, float]]
"""The ways of a block, why others were left out, and the milliseconds of each."""


@dataclass
class BlockPlanner:
    """Runs a network call by call, and decides at each block how to run it from then on."""

    network: fx.GraphModule
    blocks: list[Block]
    store: Cache
    candidates: Mapping[str, Candidate]
    repeats: int
    decisions: dict[str, Decision] = field(default_factory=dict)
    ways: dict[str, nn.Module] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    as_laid_out: bool = False

    def run(self, *inputs: Tensor) -> None:
        """Plan every block; where the rest of the network then fails, once more in its own memory formats."""
        try:
            self._run(*copied(*inputs))
        except LostDeviceError:
            raise
        except RuntimeError:  # a view of maps that lie in another memory format
            if not self.ways:
                raise
            self.as_laid_out, self.decisions = True, {}
            self._take_back()
            self._run(*copied(*inputs))

    def _run(self, *inputs: Tensor) -> None:
        by_name = {block.name: block for block in self.blocks}
        planner = self

        class BlockByBlock(fx.Interpreter):
            def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                if target in by_name:
                    step(f"{target}, block {len(planner.decisions) + 1} of {len(by_name)}")
                    planner.decide(by_name[target], args)
                return super().call_module(target, args, kwargs)

        try:
            with unchanged(self.network):
                BlockByBlock(self.network).run(*inputs)
        finally:
            for name, way in self.ways.items():
                self.network.set_submodule(name, way)

    def decide(self, block: Block, inputs: tuple[Tensor, ...]) -> None:
        """Choose how a block is run, and put that into the network."""
        ways, failed, times = self._as_before(block, inputs) or self._measured(block, inputs)
        choice = _choice(times)
        if choice != GIVEN:
            self.ways[block.name] = ways[choice]
            self.network.set_submodule(block.name, ways[choice])
        macs = _macs(block.layer, inputs[0])
        self.decisions[block.name] = Decision(block.name, str(block.epilogue), macs, times, choice, failed)

    def _as_before(self, block: Block, inputs: tuple[Tensor, ...]) -> _Found | None:
        """The way that an earlier plan chose, made and compared again; None where it is unknown or fails now."""
        key = block_key(block, inputs)
        times = self.store.times(key)
        if times is None or GIVEN not in times or not times.keys() <= self.candidates.keys():
            return None
        choice = _choice(times)
        wanted = {name: make for name, make in self.candidates.items() if name in (GIVEN, choice)}
        ways, failed = _ways(block, inputs, wanted, self.as_laid_out)
        return (ways, self.left_out.get(key, {}) | failed, times) if choice in ways else None

    def _measured(self, block: Block, inputs: tuple[Tensor, ...]) -> _Found:
        """Every way that applies, with its time, which is kept for the next plan."""
        ways, failed = _ways(block, inputs, self.candidates, self.as_laid_out)
        times = {name: sample.ms for name, sample in timed(ways, inputs, self.repeats).items()}
        key = block_key(block, inputs)
        self.store.keep(key, times)
        self.left_out[key] = failed  # a block that is alike leaves out the same
        return ways, failed, times

    def settled(self, given: nn.Module, *inputs: Tensor) -> list[Decision]:
        """The decisions once the whole network agrees with the one given: a choice that stops it is taken back."""
        if self.ways and objection_on(self.network, given, *inputs):
            for name, way in self._take_back().items():
                before = self.network.get_submodule(name)
                self.network.set_submodule(name, way)
                if reason := objection_on(self.network, given, *inputs):
                    self.network.set_submodule(name, before)
                    self.decisions[name] = self.decisions[name].refused(reason)
        return [self.decisions[block.name] for block in self.blocks if block.name in self.decisions]

    def _take_back(self) -> dict[str, nn.Module]:
        """Run every block as given again, and return the ways that were chosen."""
        chosen, self.ways = self.ways, {}
        for block in self.blocks:
            if block.name in chosen:
                self.network.set_submodule(block.name, BlockAsGiven(block.layer, block.epilogue).eval())
        return chosen


def _ways(
    block: Block, inputs: tuple[Tensor, ...], candidates: Mapping[str, Candidate], as_laid_out: bool
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Every way that applies and gives what the block as given does, and why others were left out."""
    ways: dict[str, nn.Module] = {}
    failed: dict[str, str] = {}
    expected: Any = None
    for name, make in sorted(candidates.items(), key=lambda pair: pair[0] != GIVEN):
        try:
            way = make(block)
            if way is None:
                continue
            result = way.eval()(*inputs)
        except LostDeviceError:
            raise
        except Exception as error:
            if name == GIVEN:
                raise
            failed[name] = first_line(error)
            continue
        expected = result if name == GIVEN else expected
        if name != GIVEN and not agree(result, expected):
            failed[name] = "another result"
        elif as_laid_out and result.stride() != expected.stride():
            failed[name] = "its result lies in a memory format in which the rest of the network fails"
        else:
            ways[name] = way
    return {name: ways[name] for name in candidates if name in ways}, failed


def _choice(times: Mapping[str, float]) -> str:
    """The fastest way, where it gains enough."""
    best = min(times, key=lambda name: times[name])
    return best if times[best] <= _GAIN * times[GIVEN] else GIVEN


def _macs(layer: nn.Module, x: Tensor) -> int:
    """Multiply-accumulates of a layer; unbatched inputs count as one image."""
    images, size = (x.shape[0], x.shape[1:]) if x.dim() == 4 else (1, x.shape)
    try:
        return images * count(layer, tuple(size)).macs
    except LowRankError:  # layers of other dimensions have no image size
        return 0


@torch.no_grad()
@unchanged()  # layers draw weights when they are built
def plan(
    model: nn.Module,
    example_input: Example,
    *,
    cache: str | Path | bool = True,
    candidates: Mapping[str, Candidate] = CANDIDATES,
    repeats: int = 11,
    say: Callable[[str], None] | None = None,
) -> nn.Module:
    """A network that computes what `model` does, for inference, its blocks run in the fastest way measured.

    `example_input` is an input, a tuple of all inputs by position, or a dictionary of all inputs by keyword; the
    result is called in the same way. If the path through `model` depends on sizes or dtypes, or may depend on
    which inputs are given, the result also keeps the original, and runs it for calls of any other kind. What was
    found is `notes(result).plan`, which prints as a table. A network that cannot be captured is returned as a
    copy, and the plan says why.

    - `cache`: where measured times are kept (True: the user's cache directory; False: nowhere). They are found
      again by device, versions, threads, layer and input. Where the whole network does not gain what they promise,
      all is measured anew.
    - `say`: a function that is called with each step (`say=print`), in place of the line on standard error.

    >>> planned = lr.plan(net, images)  # doctest: +SKIP
    >>> print(lr.notes(planned).plan)  # doctest: +SKIP
    """
    network, inputs, names = by_position(model, example_input)
    check_repeats(repeats)
    store = Cache.open(cache)
    options: dict[str, Any] = {"candidates": candidates, "repeats": repeats}
    with progress("plan", say):
        check_ready(network, *inputs)
        result = _planned(network, inputs, store, **options)
        found = notes(result).plan
        assert found is not None
        if store.taken and not found.used and any(decision.choice != GIVEN for decision in found.decisions):
            store.blind = True
            result = _planned(network, inputs, store, **options)
        if not store.save():
            step(f"measured times could not be kept in {store.entries.path}")
    if not names:
        return result
    named = ByKeyword(result, names)
    note(named, plan=notes(result).plan)
    return named


@torch.no_grad()
def apply_ways(
    model: nn.Module, inputs: tuple[Any, ...], ways: Mapping[str, str], *, neighbours: bool = False
) -> nn.Module:
    """The network with its blocks in the ways that a plan chose before, without measuring."""
    network, blocks, captured = in_blocks(model, *inputs)
    known = {block.name: block for block in blocks}
    for name, way in ways.items():
        made = CANDIDATES[way](known[name]) if name in known and way in CANDIDATES else None
        if made is None:
            raise LowRankError(f"{name} cannot run by {way} here.")
        network.set_submodule(name, made.eval())
    if neighbours:
        fuse_neighbours(network)
    return as_network(network, captured, copy_with(model))


def check_ready(model: nn.Module, *inputs: Any) -> None:
    """Refuse what cannot be measured, in a sentence."""
    check_rewritable(model)
    if any(module.training for module in model.modules()):
        raise LowRankError("a plan is for inference: call model.eval() first.")
    tensors = (*(value for value in inputs if isinstance(value, Tensor)), *model.parameters())
    if any(tensor.is_meta for tensor in tensors):
        raise LowRankError("on the meta device nothing takes time: put network and input on a real one.")
    check_runs(model, *inputs)


def _planned(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    store: Cache,
    *,
    candidates: Mapping[str, Candidate],
    repeats: int,
) -> nn.Module:
    given = copy_with(model)
    where = (tuple(inputs[0].shape), str(inputs[0].device))
    try:
        network, blocks, captured = in_blocks(model, *inputs)
    except CaptureError as why:
        return _unplanned(given, inputs, where, str(why), repeats)
    planner = BlockPlanner(network, blocks, store, candidates, repeats)
    if reason := objection_on(network, given, *inputs):
        return _unplanned(given, inputs, where, f"captured as a graph, {reason}", repeats)
    planner.run(*inputs)
    decisions = tuple(planner.settled(given, *inputs))
    contenders = {GIVEN: given}
    if any(decision.choice != GIVEN for decision in decisions):
        contenders["planned"] = as_network(network, captured, given)
    if inputs[0].is_cuda and (beside := _with_neighbours(network, given, *inputs)) is not None:
        contenders["planned, with neighbours"] = as_network(beside, captured, given)
    totals = timed(contenders, inputs, repeats)
    best = min(list(totals)[1:], key=lambda name: totals[name].ms, default=GIVEN)
    used = totals[best].ms < totals[GIVEN].ms
    result = contenders[best] if used else given
    neighbours = used and best != "planned"
    note(result, plan=NetworkPlan(*where, decisions, totals[GIVEN], totals[best], used, neighbours=neighbours))
    note(result, input_size=notes(model).input_size, training_card=notes(model).training_card)
    return result


def _unplanned(
    given: nn.Module, inputs: tuple[Tensor, ...], where: tuple[Any, str], reason: str, repeats: int
) -> nn.Module:
    (taken,) = timed({GIVEN: given}, inputs, repeats).values()
    note(given, plan=NetworkPlan(*where, (), taken, taken, False, reason))
    return given


def _with_neighbours(network: nn.Module, given: nn.Module, *inputs: Tensor) -> nn.Module | None:
    """On a GPU: pools and response norms by the kernels too; None if there are none, or the result differs."""
    twin = copy.deepcopy(network)
    return twin if fuse_neighbours(twin) and not objection_on(twin, given, *inputs) else None
