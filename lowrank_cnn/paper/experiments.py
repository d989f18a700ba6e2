"""The experiments that hold the paper's accuracy against ours: which networks, which recipe, which seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NIN = ("nin", "nin-c3", "nin-c3-lr")


@dataclass(frozen=True)
class Part:
    """A table of an experiment: networks by variants of one recipe, each over several seeds.

    variants: a label, and what it changes of the recipe and of the network.
    decide: find the drops of the learning rate on held-out images first, then replay them on all of them.
    equal_compute: give cheaper networks more epochs, so that all cost as many MACs as the first.
    """

    networks: tuple[str, ...]
    recipe: str
    variants: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: {"": {}})
    seeds: int = 3
    decide: bool = False
    equal_compute: bool = False


_INITS = {
    f"{init}, {'batch norm' if norm else 'no norm'}": {"init": init, "norm": norm}
    for norm in (None, "batch")
    for init in ("composite", "per-group", "torch")
}

EXPERIMENTS: dict[str, dict[str, Part]] = {
    "cifar10": {
        "paper": Part(NIN, "nin-paper", decide=True),
        "modern": Part(NIN, "nin-modern"),
        "modern-equal-compute": Part(NIN, "nin-modern", equal_compute=True),
        "init": Part(("nin-c3-lr",), "nin-init", _INITS),
    },
}
"""Parts by experiment, in the order in which they run."""
