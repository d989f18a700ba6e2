"""Plans: a kernel for a problem, with its tile. `plans` lists those worth measuring, the default first."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lowrank_cnn.kernels.conv import equivalent, gather, hopper_plan, overlap_plan, stem, tiled
from lowrank_cnn.kernels.problem import OVERLAPPING, Problem

# The fastest plans measured so far, by compute capability and shape: `auto` uses these until it is tuned.
#
# `benchmarks/gpu_kernels.py --presets` writes the table from its results.

PATH = Path(__file__).with_name("presets.json")
LEAST_BATCH = 16
"""The smallest batch that a preset is used for: presets were measured at large batches, in 16 bits."""


@lru_cache(maxsize=1)
def table() -> dict[str, dict[str, dict[str, str]]]:
    return json.loads(PATH.read_text())


def preset(problem: Problem, capability: tuple[int, int], what: str = "forward") -> str | None:
    """The stored plan of a shape as text, or None; `what` is "forward" or "input" for the input's gradient."""
    if problem.batch < LEAST_BATCH or problem.dtype.itemsize != 2:
        return None
    return table().get(f"{capability[0]}.{capability[1]}", {}).get(shape_of(problem), {}).get(what)


def shape_of(problem: Problem) -> str:
    """A problem without batch, residual and activation, which do not decide which tiles suit it."""
    groups = "+".join(f"{g.height}x{g.width},{g.filters}" for g in problem.groups)
    pool = ",pool" if problem.pool else ""
    return f"{problem.channels}x{problem.height}x{problem.width} {groups} /{problem.stride[0]}{pool}"


HOPPER = (
    (128, 128, 4, 2),
    (256, 128, 8, 1),
    (128, 256, 8, 1),
    (128, 64, 4, 3),
    (256, 32, 4, 2),
    (128, 32, 4, 4),
)
"""Pixels, filters, warps and resident programs of the Hopper tiles worth measuring."""
HOPPER_STAYING = ((128, 128, 4, 2), (128, 64, 4, 2), (256, 64, 4, 2), (256, 32, 4, 2), (128, 32, 4, 3))
"""The same where all weights of a tile stay in shared memory: narrow ones, whose weights are few."""
BOXES_ALONE = ((2, 0), (3, 0), (4, 0))
"""Boxes of pixels in flight, and no slabs of weights."""
TILED = ((128, 128, 64, 4, 3),)
"""Pixels, filters, depth, warps and stages of the plain tiles worth measuring."""
MORE_TILED = ((128, 128, 64, 4, 4), (128, 64, 64, 4, 4))
"""More plain tiles, for a thorough search."""
SMALL = ((64, 64, 64, 4, 4), (64, 32, 128, 4, 4), (32, 32, 128, 4, 4))
"""Plain tiles for problems with too few pixels to fill a GPU with large tiles."""

OLDER = (64, 64, 32, 4, 3)
"""The tile for GPUs without a tensor memory accelerator: offsets take registers, and larger tiles spill."""


class ForwardKernel(NamedTuple):
    """A kernel: the type of its tile, why it cannot run a problem, its weights' layout, and its launcher."""

    tile: type
    unsupported: Callable[[Problem], str | None]
    layout: str
    launcher: str


def _unfoldable(problem: Problem) -> str | None:
    return None if equivalent.folded(problem) else "no blocks of pixels"


def _unlengthenable(problem: Problem) -> str | None:
    longer = equivalent.lengthened(problem)
    return hopper_plan.unsupported(longer) if longer else "groups that cannot be lengthened, or need not be"


def _unenclosable(problem: Problem) -> str | None:
    worth = equivalent.is_worth_enclosing(problem)
    return hopper_plan.unsupported(problem.as_dense) if worth else "groups that need not be enclosed"


KERNELS = {
    "hopper": ForwardKernel(hopper_plan.HopperTile, hopper_plan.unsupported, "rows", "hopper.launch_hopper"),
    "lengthened": ForwardKernel(hopper_plan.HopperTile, _unlengthenable, "lengthened", "hopper.launch_hopper"),
    "enclosed": ForwardKernel(hopper_plan.HopperTile, _unenclosable, "enclosed", "hopper.launch_hopper"),
    "tiled": ForwardKernel(tiled.Tile, tiled.unsupported, "rows", "tiled.launch_tiled"),
    "stem": ForwardKernel(stem.StemTile, stem.unsupported, "union", "stem.launch_stem"),
    "gather": ForwardKernel(gather.GatherTile, gather.unsupported, "union", "gather.launch_gather"),
    "folded": ForwardKernel(tiled.Tile, _unfoldable, "blocks", "tiled.launch_tiled"),
    "window": ForwardKernel(
        hopper_plan.WindowTile, hopper_plan.window_unsupported, "windows", "window.launch_window"
    ),
    "overlap": ForwardKernel(
        overlap_plan.OverlapTile, overlap_plan.unsupported, "overlaps", "overlap.launch_overlap"
    ),
}
"""The forward kernels by name. `forward.pack_weights` makes the layouts of their weights."""


@lru_cache(maxsize=4096)
def refusal(kernel: str, problem: Problem) -> str | None:
    """Why a kernel cannot run a problem, or None if it can."""
    if not problem.can_pool_first:
        return "a pool behind a residual or behind an activation that falls"
    if problem.pool == OVERLAPPING and kernel != "overlap":
        return "a pool of overlapping windows"
    return KERNELS[kernel].unsupported(problem)


@dataclass(frozen=True)
class KernelPlan:
    """A kernel by name and its tile. As text: "tiled-p128-f64-d64-w4-s3", the tile's fields in their order."""

    kernel: str
    tile: Any

    @classmethod
    def parse(cls, text: str) -> KernelPlan:
        """The plan of a text."""
        return _parsed(text)

    def __str__(self) -> str:
        names = (field.name[0] for field in fields(self.tile))
        return "-".join([self.kernel, *(f"{n}{v}" for n, v in zip(names, astuple(self.tile), strict=True))])


def layout_of(plan: str) -> str:
    """The layout of the weights for a plan that is given as text."""
    return KERNELS[plan.partition("-")[0]].layout


@lru_cache(maxsize=4096)
def _parsed(text: str) -> KernelPlan:
    kernel, *sizes = text.split("-")
    return KernelPlan(kernel, KERNELS[kernel].tile(*(int(size[1:]) for size in sizes)))


def plans(problem: Problem, *, capability: tuple[int, int] = (0, 0), thorough: bool = False) -> list[KernelPlan]:
    """Plans for a problem on a device of a compute capability, the default first; more where `thorough`."""
    best = preset(problem, capability)
    found = [KernelPlan.parse(best)] if best else []
    if capability[0] == 9:
        found.append(KernelPlan("window", hopper_plan.WindowTile()))
        if overlap_plan.unsupported(problem) is None:
            found += [KernelPlan("overlap", tile) for tile in overlap_plan.tiles_worth_measuring(problem)]
    if stem.unsupported(problem) is None and not _wide(problem):
        found += [KernelPlan("stem", tile) for tile in stem.tiles(problem)]
        return _taken(found, problem)
    if capability[0] == 9 and not _small(problem):
        forms = {
            "hopper": problem,
            "lengthened": equivalent.lengthened(problem),
            "enclosed": problem.as_dense if equivalent.is_worth_enclosing(problem) else None,
        }
        for kernel, form in forms.items():
            tiles = hopper_tiles(form, 2 if thorough else 1) if form else []
            found += [KernelPlan(kernel, tile) for tile in tiles]
    if tiled.unsupported(problem) is None:
        found += [KernelPlan("tiled", tile) for tile in plain_tiles(problem, capability, thorough)]
        return _taken(found, problem)
    if (inner := equivalent.folded(problem)) is not None and tiled.unsupported(inner) is None:
        found.append(KernelPlan("folded", plain_tiles(inner, capability)[0]))
    found.append(KernelPlan("gather", gather.GatherTile(filters=32 if problem.pool else 64)))
    return _taken(found, problem)


def shortlist(found: Sequence[KernelPlan]) -> list[KernelPlan]:
    """The plans that are measured without tuning: the default, or the first of each kernel.

    The latter if plans compute products with zeros: whether that pays is measured.
    """
    if not {"lengthened", "enclosed"} & {plan.kernel for plan in found}:
        return [found[0]]
    return list({plan.kernel: plan for plan in reversed(found)}.values())[::-1]


def _taken(found: list[KernelPlan], problem: Problem) -> list[KernelPlan]:
    """Distinct plans whose kernel runs the problem; a preset may not, as shapes are stored without padding."""
    return [plan for plan in dict.fromkeys(found) if refusal(plan.kernel, problem) is None]


def _wide(problem: Problem) -> bool:
    """Whether a pixel has enough channels for a matrix product, so that `tiled` suits it better than `stem`."""
    return problem.channels >= 16 and tiled.unsupported(problem) is None


def hopper_tiles(problem: Problem, deepest: int = 1) -> list[hopper_plan.HopperTile]:
    """Small tiles that share a multiprocessor and large ones that do not; of each the `deepest` rings that fit."""
    if hopper_plan.unsupported(problem) is not None:
        return []
    widest = min(group.filters for group in problem.groups)
    rings = ((2, 2), (2, 3), (2, 4), (3, 5)) if hopper_plan.run_length(problem) > 1 else ((2, 2), (3, 3), (4, 4))
    found = [hopper_plan.default_tile(problem)]
    kinds = [(sizes, rings) for sizes in HOPPER] + [(sizes, BOXES_ALONE) for sizes in HOPPER_STAYING]
    for (pixels, filters, warps, residents), flights in kinds:
        if filters > widest or filters < 64 <= widest:
            continue
        tiles = [
            hopper_plan.HopperTile(pixels, filters, found[0].depth, warps, boxes, slabs, parts, residents)
            for parts in ((1, 2) if problem.pool is None else (1,))
            for boxes, slabs in flights
        ]
        fitting = [tile for tile in tiles if hopper_plan.fits(problem, tile)]
        whole = (
            [tile for tile in fitting if tile.parts == 1] if problem.residual else []
        )  # its residual is fetched ahead as a whole
        found += [*whole[-1:], *fitting[-deepest:]]
    return list(dict.fromkeys(found))


def plain_tiles(problem: Problem, capability: tuple[int, int], thorough: bool = False) -> list[tiled.Tile]:
    """Tiles no wider than the groups; small ones if large ones would leave most of a GPU idle."""
    if (0, 0) < capability < (9, 0):
        return [narrowed(problem, OLDER)]
    shapes = SMALL if _small(problem) else TILED + MORE_TILED if thorough else TILED
    return list(dict.fromkeys(narrowed(problem, sizes) for sizes in shapes))


def narrowed(problem: Problem, sizes: tuple[int, ...]) -> tiled.Tile:
    """A tile with at most as many filters as suit the groups."""
    tile, widest = tiled.Tile(*sizes), max(16, hopper_plan.filters_per_tile(problem, 256))
    return replace(tile, filters=min(tile.filters, widest))


def _small(problem: Problem) -> bool:
    """Whether tiles of 128 x 128 are fewer than a GPU's multiprocessors."""
    return problem.batch * problem.out_height * problem.out_width * problem.filters < 128 * 128 * 128
