"""The fastest network that can be made of a given one: fold, fuse, plan, lay out, compile, record, and measure.

`deploy.forms` has the forms that are tried. What was found is kept in a cache, and can be made again from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.examples import Example, by_position
from lowrank_cnn.deploy.forms import Workshop, compile_kernels_of
from lowrank_cnn.deploy.optimized import Form, Optimized
from lowrank_cnn.deploy.plan_cache import Cache, network_key
from lowrank_cnn.deploy.planning import check_ready
from lowrank_cnn.models.files import dtype_of
from lowrank_cnn.system.clock import Sample, check_budget, check_repeats
from lowrank_cnn.system.compare import unchanged
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.history import GIVEN
from lowrank_cnn.system.progress import progress
from lowrank_cnn.system.provenance import note, notes

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
