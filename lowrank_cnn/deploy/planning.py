"""Measure, for each block of a network, the ways in which it can be run, and keep the fastest.

The network is captured as a graph of blocks and run once, call by call: each block is planned on the very tensors
that reach it, in the memory format that the choices before it leave. A way that fails or gives another output is
left out. At the end the whole network is compared with the one that was given, and timed against it; the given one
is returned where they differ or nothing was gained. Within `kernels.for_graphs` all is measured as CUDA graphs,
for a network that will be captured as one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.block_planner import BlockPlanner, objection_on, timed
from lowrank_cnn.deploy.blocks import as_network, in_blocks
from lowrank_cnn.deploy.candidates import CANDIDATES, Candidate
from lowrank_cnn.deploy.examples import ByKeyword, Example, by_position, check_runs
from lowrank_cnn.deploy.plan_cache import Cache
from lowrank_cnn.kernels.fusing import fuse_neighbours
from lowrank_cnn.kernels.network_graph import CaptureError
from lowrank_cnn.method.rewriting import copy_with
from lowrank_cnn.method.selection import check_rewritable
from lowrank_cnn.system.clock import check_repeats
from lowrank_cnn.system.compare import unchanged
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.history import GIVEN, NetworkPlan
from lowrank_cnn.system.progress import progress, step
from lowrank_cnn.system.provenance import note, notes


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
