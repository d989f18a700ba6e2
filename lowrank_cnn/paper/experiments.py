"""The experiments that compare the paper's accuracies with ours: networks, recipes and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lowrank_cnn.core.errors import LowRankError, nearest
from lowrank_cnn.models import googlenet, nin, vgg
from lowrank_cnn.paper.published import MAIN_TABLES

VGG, GOOGLENET, NIN = tuple(vgg.VARIANTS), tuple(googlenet.VARIANTS), tuple(nin.VARIANTS)
PLACES = ("vgg11-gmp", "vgg11-gmp-sf", "vgg11-gmp-lr-join", "vgg11-gmp-lr")


@dataclass(frozen=True)
class ExperimentPart:
    """A table of an experiment: networks by variants of one recipe, each over several seeds.

    variants: labels, each with its changes to the recipe and the network.
    own: changes for single networks; "recipe" names another recipe.
    as_costly_as: train cheaper networks for more epochs, up to the MACs of this one.
    tables: the published tables that it is compared with.
    note: a remark for readers of the table.
    """

    networks: tuple[str, ...]
    recipe: str
    variants: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: {"": {}})
    seeds: int = 3
    as_costly_as: str = ""
    own: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    tables: tuple[str, ...] = MAIN_TABLES
    note: str = ""


@dataclass(frozen=True)
class ExperimentLine:
    """A line of a table: a network of a part, with one variant of its recipe."""

    part: str
    network: str
    variant: str

    def directory(self, out: Path, seed: int) -> Path:
        """The folder of its run with this seed."""
        variant = self.variant.replace(", ", "-").replace(" ", "-")
        return out / self.part / "-".join(filter(None, [self.network, variant, f"seed{seed}"]))


_INITS = {
    f"{init}, {'batch norm' if norm else 'no norm'}": {"init": init, "norm": norm}
    for norm in (None, "batch")
    for init in ("composite", "per-group", "torch")
}

_SMALL = (
    "Published: ILSVRC, 1000 classes, 224x224. Here: crops of 56 from images of 64, as 224 from 256, so that "
    "maps have a quarter of the published side. vgg11 flattens 2x2 maps in place of 7x7; GoogLeNet's first conv "
    "has stride 1 in place of 2, so that its maps have half of the published side, the last 3x3 in place of 7x7."
)


_ONE_RUN = (
    "One run of each network: the learning rate is divided when accuracy on the 2% of training images held out "
    "levels off, and the run goes on; the validation set is used once, at the end, one centre crop per image."
)

_BY_HAND = (
    "The learning rate is divided after the same epochs in all networks, set by hand near where accuracy on "
    "held-out training images had levelled off for nin and nin-c3; the test set is used once, at the end."
)

CLASSES = {"cifar10": 10}
"""Classes of data sets that are used whole; the others may be tried on some of their classes."""

EXPERIMENTS: dict[str, dict[str, ExperimentPart]] = {
    "cifar10": {
        "paper": ExperimentPart(
            NIN, "nin-paper", own={"nin-c3": {"dropout": 0.4}, "nin-c3-lr": {"dropout": 0.2}}, note=_BY_HAND
        ),
        "modern": ExperimentPart(NIN, "nin-modern"),
        "modern-equal-compute": ExperimentPart(("nin-c3-lr",), "nin-modern", as_costly_as="nin"),
        "init": ExperimentPart(("nin-c3-lr",), "nin-init", _INITS),
    },
    "tiny-imagenet": {
        "paper": ExperimentPart(
            (*VGG, *GOOGLENET),
            "tiny-vgg",
            seeds=2,
            own={network: {"recipe": "tiny-googlenet", "stride": 1} for network in GOOGLENET},
            note=_SMALL,
        ),
    },
    "ilsvrc": {
        "paper": ExperimentPart(
            (*VGG, *GOOGLENET),
            "vgg-paper",
            seeds=1,
            own={network: {"recipe": "googlenet-paper"} for network in GOOGLENET},
            note=_ONE_RUN,
        ),
    },
    "places": {
        "paper": ExperimentPart(
            PLACES, "vgg-paper", {"": {"stride": 2}}, seeds=1, tables=("vgg-places",), note=_ONE_RUN
        ),
    },
}
"""Parts by experiment, in the order in which they run."""


def parts_of(experiment: str) -> dict[str, ExperimentPart]:
    """The parts of an experiment, by name."""
    if experiment not in EXPERIMENTS:
        raise LowRankError(f"there is no experiment {experiment!r}; {nearest(experiment, EXPERIMENTS)}")
    return EXPERIMENTS[experiment]


def lines(experiment: str, parts: Iterable[str] = (), networks: Iterable[str] = ()) -> list[ExperimentLine]:
    """Every line of an experiment, or those of the parts and networks named."""
    known = parts_of(experiment)
    _check(experiment, "part", parts, known)
    _check(experiment, "network", networks, {network for part in known.values() for network in part.networks})
    return [
        ExperimentLine(name, network, variant)
        for name, part in known.items()
        for network in part.networks
        for variant in part.variants
        if (not parts or name in parts) and (not networks or network in networks)
    ]


def _check(experiment: str, what: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise LowRankError(f"{experiment} has no {what} {name!r}; {nearest(name, known)}")
