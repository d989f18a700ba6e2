"""Measure, for each block of a network, the ways in which it can be run, and keep the fastest.

Blocks are planned in the order of definition, each on the very tensor that reaches it, in the memory format that
the choices before it leave. A way that does not give the same output is not chosen. At the end the whole network
is measured against the one that was given, and that one is returned where nothing was gained. Within
`kernels.for_graphs` all is measured as CUDA graphs, for a network that will be captured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.blocks import LAYERS, Block, find_blocks
from lowrank_cnn.deploy.candidates import CANDIDATES, Candidate
from lowrank_cnn.deploy.plan_cache import Cache
from lowrank_cnn.deploy.recorded import alike
from lowrank_cnn.kernels.autotune.measure import captured
from lowrank_cnn.kernels.mode import is_for_graphs
from lowrank_cnn.method.counting import count
from lowrank_cnn.method.selection import check_module
from lowrank_cnn.system.clock import Sample, measure
from lowrank_cnn.system.errors import LostDeviceError, LowRankError
from lowrank_cnn.system.provenance import note, notes
from lowrank_cnn.system.text import si, text_table

GIVEN = "as given"
_GAIN = 0.97
"""A block is run in another way only if that takes at most so much of the time: less is noise."""


@dataclass(frozen=True)
class Decision:
    """A block: its multiply-accumulates for this input, the milliseconds of each way, and the one chosen."""

    name: str
    layer: str
    macs: int
    times: Mapping[str, float]
    choice: str


@dataclass(frozen=True)
class Plan:
    """All decisions, and the whole network before and after; `used` is False where it was better as given."""

    input: tuple[int, ...]
    device: str
    decisions: tuple[Decision, ...]
    before: Sample
    after: Sample
    used: bool

    def __str__(self) -> str:
        """The decision table: for each block its MACs, the milliseconds of each way, and the one chosen."""
        ways = list(dict.fromkeys(way for row in self.decisions for way in row.times))
        rows = [
            (row.name, si(row.macs), *(_shown(row.times.get(way)) for way in ways), row.choice)
            for row in self.decisions
        ]
        table = text_table(("block", ">MACs", *(f">{way}" for way in ways), "chosen"), rows)
        verdict = "the plan is used" if self.used else "nothing gained: as given"
        return f"{table}\nwhole network: {self.before.ms:.3f} ms before, {self.after.ms:.3f} after; {verdict}"

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)


@torch.no_grad()
def plan(
    model: nn.Module,
    example_input: Tensor,
    *,
    cache: str | Path | bool = True,
    candidates: Mapping[str, Candidate] = CANDIDATES,
    repeats: int = 11,
    say: Callable[[str], None] | None = None,
) -> nn.Module:
    """A copy of `model`, for inference, whose blocks run in the fastest way measured; its `notes` hold the plan.

    `cache` says where measured times are kept (True: the user's cache directory; False: nowhere). They are found
    again by device, versions, threads, layer and input; where what they promised does not show in the whole
    network, since the machine was busy then say, all is measured anew. `say` is told which block is measured.
    """
    check_ready(model, example_input)
    store = Cache.open(cache)
    result = _planned(model, example_input, store, candidates, repeats, say or silent)
    found = notes(result).plan
    assert found is not None
    if store.taken and not found.used and any(decision.choice != GIVEN for decision in found.decisions):
        store.blind = True
        result = _planned(model, example_input, store, candidates, repeats, say or silent)
    if not store.save() and say:
        say(f"measured times could not be kept in {store.entries.path}")
    return result


def silent(_text: str) -> None:
    """Tell nobody."""


def _planned(
    model: nn.Module,
    example_input: Tensor,
    store: Cache,
    candidates: Mapping[str, Candidate],
    repeats: int,
    say: Callable[[str], None],
) -> nn.Module:
    given = copy.deepcopy(model)
    planned = nn.Sequential(copy.deepcopy(model)) if type(model) in LAYERS else copy.deepcopy(model)
    blocks, decisions = find_blocks(planned), []
    for place, block in enumerate(blocks, 1):
        say(f"{block.name}, block {place} of {len(blocks)}")
        decisions.append(_decide(planned, block, example_input, candidates, store, repeats))
    contenders = {GIVEN: given}
    if any(decision.choice != GIVEN for decision in decisions):
        contenders["planned"] = planned
    if example_input.is_cuda and (beside := _with_neighbours(planned, example_input)) is not None:
        contenders["planned, with neighbours"] = beside
    totals = timed(contenders, example_input, repeats)
    before = totals[GIVEN]
    best = min(list(totals)[1:], key=lambda name: totals[name].ms, default=GIVEN)
    used = totals[best].ms < before.ms
    result, shape = contenders[best] if used else given, tuple(example_input.shape)
    device = str(example_input.device)
    note(result, plan=Plan(shape, device, tuple(decisions), before, totals[best], used))
    return result


def _with_neighbours(planned: nn.Module, x: Tensor) -> nn.Module | None:
    """On a GPU: pools and response norms by the kernels too; None where a forward does not have that."""
    from lowrank_cnn.kernels.fuse import fuse_neighbours

    twin = copy.deepcopy(planned)
    try:
        return twin if fuse_neighbours(twin) and alike(twin(x), planned(x)) else None
    except LostDeviceError:
        raise
    except Exception:  # a forward that asks a pool for its size, say
        return None


@torch.no_grad()
def timed(modules: Mapping[str, nn.Module], x: Tensor, repeats: int) -> dict[str, Sample]:
    """Several modules on one input, in turns; within `for_graphs` as CUDA graphs, whose launches cost nothing."""
    runs = {name: lambda m=m: m(x) for name, m in modules.items()}
    if not x.is_cuda:
        return measure(runs, repeats=repeats)
    with torch.cuda.device(x.device):
        if is_for_graphs():
            runs = {name: captured(run).replay for name, run in runs.items()}
        return measure(runs, repeats=repeats, cuda=True)


def check_ready(model: nn.Module, example_input: Tensor) -> None:
    """Refuse what cannot be measured, in a sentence."""
    check_module(model)
    if not isinstance(example_input, Tensor):
        raise LowRankError(f"an example input is a tensor, not {type(example_input).__name__}.")
    if any(module.training for module in model.modules()):
        raise LowRankError("a plan is for inference: call model.eval() first.")
    if example_input.is_meta or any(parameter.is_meta for parameter in model.parameters()):
        raise LowRankError("on the meta device nothing takes time: put network and input on a real one.")
    shape = "x".join(map(str, example_input.shape))
    if example_input.numel() == 0:
        raise LowRankError(f"an example input of {shape} is empty.")
    try:
        with torch.no_grad():
            model(example_input)
    except LowRankError:
        raise
    except Exception as error:  # whatever the forward makes of another size, dtype or device
        kind = str(example_input.dtype).removeprefix("torch.")
        reason = str(error).strip().partition("\n")[0]
        raise LowRankError(f"the network does not run on an input of {shape}, {kind}: {reason}") from error


def _decide(
    network: nn.Module,
    block: Block,
    x: Tensor,
    candidates: Mapping[str, Candidate],
    store: Cache,
    repeats: int,
) -> Decision:
    """Choose how a block is run, and put that into the network."""
    seen = _input_of(network, block.layer, x)
    if seen is None:
        return Decision(block.name, _describe(block), 0, {}, GIVEN)
    ways = _ways(block, seen, candidates)
    times = store.times(block, seen, list(ways))
    if times is None:
        times = {name: sample.ms for name, sample in timed(ways, seen, repeats).items()}
        store.keep(block, seen, times)
    best = min(times, key=lambda name: times[name])
    choice = best if times[best] <= _GAIN * times[GIVEN] else GIVEN
    if choice != GIVEN:
        network.set_submodule(block.name, ways[choice])
        for name in block.rest:
            network.set_submodule(name, nn.Identity().eval())
    return Decision(block.name, _describe(block), _macs(block.layer, seen), times, choice)


def _ways(block: Block, x: Tensor, candidates: Mapping[str, Candidate]) -> dict[str, nn.Module]:
    """Every way that applies and gives what the block as given does."""
    made = {name: make(block) for name, make in candidates.items()}
    ways = {name: module.eval() for name, module in made.items() if module is not None}
    expected = ways[GIVEN](x)
    return {name: way for name, way in ways.items() if alike(way(x), expected, single=1e-3)}


class _SeenError(Exception):
    """Stops a run as soon as the tensor that was looked for has come by."""


def _input_of(network: nn.Module, layer: nn.Module, x: Tensor) -> Tensor | None:
    """The tensor that reaches a layer, in its memory format; None for a layer that does not run."""
    found: list[Tensor] = []

    def look(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found.append(inputs[0].clone())
        raise _SeenError

    hook = layer.register_forward_pre_hook(look)
    try:
        network(x)
    except _SeenError:
        pass
    finally:
        hook.remove()
    return found[0] if found else None


def _shown(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.3f}"


def _macs(layer: nn.Module, x: Tensor) -> int:
    return x.shape[0] * count(layer, x.shape[1:]).macs


def _describe(block: Block) -> str:
    return " + ".join(type(module).__name__ for module in block.modules)
