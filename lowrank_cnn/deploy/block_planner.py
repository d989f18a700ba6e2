"""Decide for each block of a network how it runs: measure every candidate on the tensors that reach the block.

The network runs once, call by call. A candidate that fails or gives another output is left out; of the others, the
fastest replaces the block as given where it gains enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from lowrank_cnn.deploy.blocks import Block, BlockAsGiven
from lowrank_cnn.deploy.candidates import Candidate
from lowrank_cnn.deploy.plan_cache import Cache, block_key
from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.kernels.mode import is_for_graphs
from lowrank_cnn.method.counting import count
from lowrank_cnn.system.clock import Sample, measure
from lowrank_cnn.system.compare import agree, copied, objection, unchanged
from lowrank_cnn.system.errors import LostDeviceError, LowRankError, first_line
from lowrank_cnn.system.history import GIVEN, Decision
from lowrank_cnn.system.progress import step

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
