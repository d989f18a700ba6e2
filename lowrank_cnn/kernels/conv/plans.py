"""Which kernel takes a problem, with which tile: a *plan*.

`plans` lists those worth measuring, the default first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from lowrank_cnn.kernels.conv import fold, gather, hopper_plan, stem, tiled, window_plan
from lowrank_cnn.kernels.conv.known import known
from lowrank_cnn.kernels.problem import Problem

HOPPER = ((128, 128, 4, 2), (256, 128, 8, 1), (128, 256, 8, 1), (128, 64, 4, 3))
"""Pixels, filters, warps and resident programs of the Hopper tiles worth measuring."""
TILED = ((128, 128, 64, 4, 3),)
"""Pixels, filters, depth, warps and stages of the plain tiles worth measuring."""
MORE_TILED = ((128, 128, 64, 4, 4), (128, 64, 64, 4, 4))
"""Those worth measuring once."""
SMALL = ((64, 64, 64, 4, 4), (64, 32, 128, 4, 4), (32, 32, 128, 4, 4))
"""The same for problems of too few pixels to fill a GPU with large tiles."""

OLDER = (64, 64, 32, 4, 3)
"""The tile for GPUs without a tensor memory accelerator: places in memory take registers, larger ones spill."""
_TILES: dict[str, type] = {
    "hopper": hopper_plan.HopperTile,
    "tiled": tiled.Tile,
    "stem": stem.StemTile,
    "gather": gather.GatherTile,
    "folded": tiled.Tile,
    "window": window_plan.WindowTile,
}
_UNSUPPORTED: dict[str, Callable[[Problem], str | None]] = {
    "hopper": hopper_plan.unsupported,
    "tiled": tiled.unsupported,
    "stem": stem.unsupported,
    "gather": gather.unsupported,
    "folded": lambda problem: None if fold.folded(problem) else "no blocks of pixels",
    "window": window_plan.unsupported,
}


@lru_cache(maxsize=4096)
def refusal(kernel: str, problem: Problem) -> str | None:
    """Why a kernel cannot take a problem, or None."""
    return _UNSUPPORTED[kernel](problem)


@dataclass(frozen=True)
class Plan:
    """A kernel by name and its tile."""

    kernel: str
    tile: Any

    def to_dict(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "tile": asdict(self.tile)}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Plan:
        return cls(stored["kernel"], _TILES[stored["kernel"]](**stored["tile"]))

    def __str__(self) -> str:
        sizes = "-".join(f"{name[0]}{value}" for name, value in asdict(self.tile).items())
        return f"{self.kernel}-{sizes}"


def plans(problem: Problem, *, capability: tuple[int, int] = (0, 0), thorough: bool = False) -> list[Plan]:
    """Plans for a problem on a device of a compute capability, the default first; more where `thorough`."""
    best = known(problem, capability)
    # Shapes are known without their padding, by which a kernel may refuse them.
    found = [Plan.from_dict(best)] if best and refusal(best["kernel"], problem) is None else []
    if capability[0] == 9 and window_plan.unsupported(problem) is None:
        found.append(Plan("window", window_plan.WindowTile()))
    if stem.unsupported(problem) is None:
        found += [Plan("stem", tile) for tile in stem.tiles(problem)]
        return list(dict.fromkeys(found))
    hopper = capability[0] == 9 and not _small(problem)
    found += [Plan("hopper", tile) for tile in hopper_tiles(problem, 2 if thorough else 1)] if hopper else []
    if tiled.unsupported(problem) is None:
        found += [Plan("tiled", tile) for tile in plain_tiles(problem, capability, thorough)]
        return list(dict.fromkeys(found))
    if (inner := fold.folded(problem)) is not None and tiled.unsupported(inner) is None:
        found.append(Plan("folded", plain_tiles(inner, capability)[0]))
    if gather.unsupported(problem) is None:
        found.append(Plan("gather", gather.GatherTile(filters=32 if problem.pool else 64)))
    return list(dict.fromkeys(found))


def hopper_tiles(problem: Problem, rings: int = 1) -> list[hopper_plan.HopperTile]:
    """Small tiles of which several reside together, and large ones alone; the deepest `rings` that fit of each."""
    if hopper_plan.unsupported(problem) is not None:
        return []
    widest = min(group.filters for group in problem.groups)
    sizes = ((2, 2), (2, 3), (2, 4), (3, 5)) if hopper_plan.run_length(problem) > 1 else ((3, 3), (4, 4))
    found = [hopper_plan.default_tile(problem)]
    for pixels, filters, warps, residents in HOPPER:
        tiles = [
            hopper_plan.HopperTile(pixels, filters, found[0].depth, warps, boxes, slabs, parts, residents)
            for parts in ((1, 2) if problem.pool is None else (1,))
            for boxes, slabs in sizes
        ]
        fitting = [tile for tile in tiles if hopper_plan.fits(problem, tile)]
        found += fitting[-rings:] if filters <= widest else []
    return list(dict.fromkeys(found))


def plain_tiles(problem: Problem, capability: tuple[int, int], thorough: bool = False) -> list[tiled.Tile]:
    """Tiles no wider than the groups; small ones where large ones would leave most of a GPU idle."""
    if (0, 0) < capability < (9, 0):
        return [narrowed(problem, OLDER)]
    shapes = SMALL if _small(problem) else TILED + MORE_TILED if thorough else TILED
    return list(dict.fromkeys(narrowed(problem, sizes) for sizes in shapes))


def narrowed(problem: Problem, sizes: tuple[int, ...]) -> tiled.Tile:
    """A tile of no more filters than suit the groups."""
    tile, widest = tiled.Tile(*sizes), max(16, hopper_plan.filters_per_tile(problem, 256))
    return replace(tile, filters=min(tile.filters, widest))


def _small(problem: Problem) -> bool:
    """Whether tiles of 128 x 128 are fewer than a GPU's multiprocessors."""
    return problem.batch * problem.out_height * problem.out_width * problem.filters < 128 * 128 * 128
