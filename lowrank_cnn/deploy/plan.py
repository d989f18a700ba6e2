"""Measure, for each block of a network, the ways in which it can be run, and keep the fastest.

The network is captured as a graph of blocks and run once, call by call: each block is planned on its actual
inputs, in the memory format that the earlier choices give them. At the end the whole network is compared with the
given one, and timed against it; the given one is returned if they differ or nothing was gained. Within
`kernels.for_graphs` all is measured as CUDA graphs, for a network that will be captured as one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from lowrank_cnn.core import __version__
from lowrank_cnn.core.cache import JsonCache, cache_folder
from lowrank_cnn.core.clock import Sample, check_repeats, measure
from lowrank_cnn.core.compare import agree, copied, objection, unchanged
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import AsDict, note, notes
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.core.search import Search
from lowrank_cnn.core.text import si, text_table
from lowrank_cnn.deploy.blocks import CANDIDATES, Block, Candidate, as_given, as_network, in_blocks
from lowrank_cnn.graph.capture import CaptureError
from lowrank_cnn.graph.examples import ByKeyword, Example, by_position, check_runs
from lowrank_cnn.graph.fuse import fuse_neighbours
from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.kernels.device import is_for_graphs
from lowrank_cnn.kernels.strips import installed_version
from lowrank_cnn.method.count import count
from lowrank_cnn.method.rewrite import copy_with, is_channels_last
from lowrank_cnn.method.select import check_rewritable

GIVEN, PLANNED = "as given", "planned"
"""The way of blocks for which no other way is faster, and the name of a network with other ways."""
Blocks = Mapping[str, Block]
Candidates = Mapping[str, Candidate]


@dataclass(frozen=True)
class Decision:
    """A block: its epilogue, its multiply-accumulates for this input, the milliseconds of each way, the choice.

    `failed` has the reasons for ways left out.
    """

    name: str
    epilogue: str
    macs: int
    times: Mapping[str, float]
    choice: str
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkPlan(AsDict):
    """All decisions, and the whole network before and after.

    `used` is False if the network was better as given, and `reason` says why nothing could be planned.
    """

    input: tuple[int, ...]
    device: str
    decisions: tuple[Decision, ...]
    before: Sample
    after: Sample
    used: bool
    reason: str = ""

    @property
    def ways(self) -> dict[str, str]:
        """The blocks that do not run as given, by name; none if the plan is not used."""
        return {row.name: row.choice for row in self.decisions if row.choice != GIVEN} if self.used else {}

    def __str__(self) -> str:
        """The decision table: for each block its MACs, the milliseconds of each way, and the one chosen."""
        if self.reason:
            return f"not planned: {self.reason}"
        ways = list(dict.fromkeys(way for row in self.decisions for way in row.times))
        rows = []
        for row in self.decisions:
            times = (f"{row.times[way]:.3f}" if way in row.times else "" for way in ways)
            rows.append((row.name, si(row.macs), *times, row.choice))
        table = text_table(("block", ">MACs", *(f">{way}" for way in ways), "chosen"), rows)
        verdict = "the plan is used" if self.used else "nothing gained: as given"
        whole = f"whole network: {self.before.ms:.3f} ms before, {self.after.ms:.3f} after; {verdict}"
        notes = [f"{row.name}, {way}: {why}" for row in self.decisions for way, why in row.failed.items()]
        return "\n".join([table, *notes, whole])

    __repr__ = __str__


def open_times(where: str | Path | bool) -> JsonCache:
    """Times of blocks and of whole networks (True: in the user's cache directory; False: in memory alone)."""
    path = cache_folder() / "plans.json" if where is True else Path(where) if where else None
    return JsonCache(path, key="plans", valid=_is_times)


def _is_times(entry: object) -> bool:
    return isinstance(entry, dict) and all(isinstance(ms, int | float) and ms >= 0 for ms in entry.values())


def block_key(block: Block, inputs: Sequence[Tensor]) -> str:
    """Everything that the times of a block depend on: machine, versions, threads, layer, epilogue and inputs."""
    return _key("block", str(block), inputs, is_for_graphs())


def network_key(network: nn.Module, inputs: Sequence[Tensor], *options: object) -> str:
    """Everything that the times of a whole network depend on: its structure instead of one layer's."""
    return _key("network", f"{type(network).__qualname__} {network}", inputs, *options)


def _key(kind: str, what: str, inputs: Sequence[Tensor], *options: object) -> str:
    where = [_machine(), torch.get_num_threads(), str(inputs[0].device)]
    described = [[str(x.dtype), list(x.shape), is_channels_last(x)] for x in inputs]
    text = json.dumps([__version__, kind, where, described, what, list(map(str, options))])
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _machine() -> str:
    known = environment()
    return str([*(known[name] for name in ("torch", "triton", "cudnn", "gpu", "cpu")), installed_version()])


_GAIN = 0.97
"""Another way must take at most this share of the time: smaller gains are noise."""


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


class BlockPlanner(fx.Interpreter):
    """Runs a network call by call and decides how each block runs; `recalled` if by times of an earlier plan."""

    def __init__(
        self, network: fx.GraphModule, blocks: Blocks, store: JsonCache, candidates: Candidates, repeats: int
    ) -> None:
        super().__init__(network)
        self.network, self.blocks = network, blocks
        self.store, self.candidates, self.repeats = store, candidates, repeats
        self.decisions: dict[str, Decision] = {}
        self.ways: dict[str, nn.Module] = {}
        self.left_out: dict[str, dict[str, str]] = {}
        self.as_laid_out = self.recalled = False

    def decide_all(self, *inputs: Tensor) -> None:
        """Plan every block; if the rest of the network then fails, once more in its own memory formats."""
        try:
            self._run(*copied(*inputs))
        except RuntimeError:  # a view of a tensor that has another memory format
            if not self.ways:
                raise
            self.as_laid_out, self.decisions = True, {}
            self.take_back()
            self._run(*copied(*inputs))

    def _run(self, *inputs: Tensor) -> None:
        try:
            with unchanged(self.network):
                self.run(*inputs)
        finally:
            for name, way in self.ways.items():
                self.network.set_submodule(name, way)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in self.blocks:
            step(f"{target}, block {len(self.decisions) + 1} of {len(self.blocks)}")
            self.decide(self.blocks[target], args)
        return super().call_module(target, args, kwargs)

    def decide(self, block: Block, inputs: tuple[Tensor, ...]) -> None:
        """Choose the way of a block: that of an earlier plan if it still agrees, else the fastest of all."""
        key = block_key(block, inputs)
        times: dict[str, float] | None = self.store.get(key)
        search: Search[str, nn.Module] = Search()
        if times is not None and GIVEN in times and times.keys() <= self.candidates.keys():
            search = self._ways(block, inputs, {GIVEN, fastest_way(times)})
            self.recalled |= key not in self.left_out
        if times is None or fastest_way(times) not in search.made:
            search = self._ways(block, inputs, self.candidates)
            taken = search.times(partial(timed, inputs=inputs, repeats=self.repeats))
            self.store[key] = times = {name: sample.ms for name, sample in taken.items()}
            self.left_out[key] = search.failed  # an equal block leaves out the same
        choice = fastest_way(times)
        if choice != GIVEN:
            self.ways[block.name] = search.made[choice]
            self.network.set_submodule(block.name, search.made[choice])
        failed = self.left_out.get(key, {}) | search.failed
        macs = _macs(block.layer, inputs[0])
        self.decisions[block.name] = Decision(block.name, str(block.epilogue), macs, times, choice, failed)

    def _ways(self, block: Block, inputs: tuple[Tensor, ...], names: Collection[str]) -> Search[str, nn.Module]:
        """The ways of these names that apply and agree with the block as given."""
        given = self.candidates[GIVEN](block)
        assert given is not None
        expected = given.eval()(*inputs)

        def differs(way: nn.Module) -> str:
            result = way.eval()(*inputs)
            if not agree(result, expected):
                return "another result"
            if self.as_laid_out and result.stride() != expected.stride():
                return "the rest of the network fails on the memory format of its result"
            return ""

        search: Search[str, nn.Module] = Search(differs)
        search.made[GIVEN] = given
        for name, make in self.candidates.items():
            if name in names and name != GIVEN:
                search.attempt(name, partial(make, block))
        return search

    def refuse_wrong(self, given: nn.Module, *inputs: Tensor) -> None:
        """Put the chosen ways into the network one by one, and refuse those with which the whole differs."""
        for name, way in self.take_back().items():
            before = self.network.get_submodule(name)
            self.network.set_submodule(name, way)
            if reason := objection_on(self.network, given, *inputs):
                self.network.set_submodule(name, before)
                row = self.decisions[name]
                self.decisions[name] = replace(row, choice=GIVEN, failed={**row.failed, row.choice: reason})

    def take_back(self) -> dict[str, nn.Module]:
        """Run every block as given again, and return the ways that were chosen."""
        chosen, self.ways = self.ways, {}
        for name in chosen:
            self.network.set_submodule(name, as_given(self.blocks[name]).eval())
        return chosen


def fastest_way(times: Mapping[str, float]) -> str:
    """The fastest way if it gains enough, else the block as given."""
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
    candidates: Candidates = CANDIDATES,
    repeats: int = 11,
    say: Callable[[str], None] | None = None,
) -> nn.Module:
    """A network equivalent to `model`, for inference, whose blocks run in the fastest way measured.

    `example_input` is an input, a tuple of all inputs by position, or a dictionary of all inputs by keyword; the
    result is called in the same way. If the path through `model` depends on sizes or dtypes, or may depend on
    which inputs are given, the result also keeps the original, and runs it for calls of any other kind.
    `notes(result).plan` is the plan, which prints as a table. A network that cannot be captured is returned as a
    copy, and the plan says why.

    - `cache`: where measured times are kept (True: the user's cache directory; False: nowhere). Their key is
      device, versions, threads, layer and input. If the whole network does not gain what they predict, everything
      is measured again.
    - `say`: a function that is called with each step (`say=print`), in place of the line on standard error.

    >>> planned = lr.plan(net, images)  # doctest: +SKIP
    >>> print(lr.notes(planned).plan)  # doctest: +SKIP
    """
    network, inputs, names = by_position(model, example_input)
    check_repeats(repeats)
    store = open_times(cache)
    with progress("plan", say):
        check_ready(network, *inputs)
        result, belied = _planned(network, inputs, store, candidates, repeats)
        if belied:
            store.entries.clear()
            result, _ = _planned(network, inputs, store, candidates, repeats)
        if not store.save():
            step(f"measured times could not be kept in {store.path}")
    if not names:
        return result
    named = ByKeyword(result, names)
    note(named, plan=notes(result).plan)
    return named


@torch.no_grad()
def apply_ways(model: nn.Module, inputs: tuple[Any, ...], *, ways: Mapping[str, str]) -> nn.Module:
    """The network with its blocks as an earlier plan chose them, without measuring."""
    if not ways:
        return model
    network, blocks, captured = in_blocks(model, *inputs)
    for name, way in ways.items():
        made = CANDIDATES[way](blocks[name]) if name in blocks and way in CANDIDATES else None
        if made is None:
            raise LowRankError(f"{name} cannot run by {way} here.")
        network.set_submodule(name, made.eval())
    if inputs[0].is_cuda:
        fuse_neighbours(network)
    return as_network(network, captured, copy_with(model))


def check_ready(model: nn.Module, *inputs: Any) -> None:
    """Refuse a network that cannot be measured."""
    check_rewritable(model)
    if any(module.training for module in model.modules()):
        raise LowRankError("a plan is for inference: call model.eval() first.")
    tensors = (*(value for value in inputs if isinstance(value, Tensor)), *model.parameters())
    if any(tensor.is_meta for tensor in tensors):
        raise LowRankError("cannot time meta tensors: put network and input on a real device.")
    check_runs(model, *inputs)


def _planned(
    model: nn.Module, inputs: tuple[Tensor, ...], store: JsonCache, candidates: Candidates, repeats: int
) -> tuple[nn.Module, bool]:
    """A planned network, and whether it lacks the gain that the times of an earlier plan predicted."""
    given, reason, decisions, recalled = copy_with(model), "", (), False
    search: Search[str, nn.Module] = Search(lambda network: objection_on(network, given, *inputs))
    search.made[GIVEN] = given
    try:
        network, blocks, graph = in_blocks(model, *inputs)
        reason = objection_on(network, given, *inputs)
        reason = reason and f"captured as a graph, {reason}"
    except CaptureError as why:
        reason = str(why)
    if not reason:
        planner = BlockPlanner(network, blocks, store, candidates, repeats)
        planner.decide_all(*inputs)
        whole = partial(as_network, network, graph, given)
        beside = fuse_neighbours(network) if inputs[0].is_cuda else 0  # pools and response norms, by GPU kernels
        if (planner.ways or beside) and not search.attempt(PLANNED, whole):
            planner.refuse_wrong(given, *inputs)
            if any(decision.choice != GIVEN for decision in planner.decisions.values()):
                search.attempt(PLANNED, whole)
        decisions, recalled = tuple(planner.decisions.values()), planner.recalled
    totals = search.times(partial(timed, inputs=inputs, repeats=repeats))
    best = min(totals, key=lambda name: totals[name].ms)
    after = totals.get(PLANNED, totals[GIVEN])
    about = tuple(inputs[0].shape), str(inputs[0].device), decisions
    found = NetworkPlan(*about, totals[GIVEN], after, best != GIVEN, reason)
    result = search.made[best]
    note(result, plan=found, input_size=notes(model).input_size, training_card=notes(model).training_card)
    return result, recalled and best == GIVEN and any(row.choice != GIVEN for row in decisions)
