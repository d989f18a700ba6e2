"""The published figures, as data.

Source: Ioannou et al., "Training CNNs with Low-Rank Filters for Efficient Image Classification" (ICLR 2016), and
the result files of the first author's public thesis repository, which give the tables' figures in full digits.
Rows are those of the tables; the column `counts_reproduced` lists the counts that our reading of the architecture
reproduces.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

MAIN_TABLES = ("vgg-ilsvrc", "googlenet-ilsvrc", "nin-cifar10")


@dataclass(frozen=True)
class Published:
    """A row of a published table; None if the paper gives no figure."""

    table: str
    network: str
    dataset: str
    input: int | None
    stride: int
    macs: int
    params: int
    top1: float | None
    top5: float | None

    @property
    def crops(self) -> int:
        """How many crops of each image the accuracy averages: 10 for "googlenet-10-crop"."""
        found = re.search(r"-(\d+)-crop$", self.network)
        return int(found[1]) if found else 1

    @property
    def macs_per_image(self) -> int:
        """MACs of all crops together; the table prints those of one crop."""
        return self.macs * self.crops


@dataclass(frozen=True)
class PublishedTiming:
    """A layer of vgg11-gmp-lr: its MACs and the milliseconds that Caffe took for it."""

    layer: str
    macs: int
    cpu_ms: float
    gpu_ms: float


@cache
def rows() -> tuple[Published, ...]:
    return tuple(_row(line) for line in _read("published.csv"))


@cache
def published() -> dict[str, Published]:
    """The main tables' rows (ILSVRC and CIFAR-10), by network."""
    return {row.network: row for row in rows() if row.table in MAIN_TABLES}


@cache
def timings() -> tuple[PublishedTiming, ...]:
    """The paper's layer timings (its figure of MACs against time)."""
    lines = map(dict.values, _read("published_timings.csv"))
    return tuple(PublishedTiming(layer, int(macs), float(cpu), float(gpu)) for layer, macs, cpu, gpu in lines)


def _read(name: str) -> Iterator[dict[str, str]]:
    return csv.DictReader((files("lowrank_cnn.paper") / name).read_text(encoding="utf-8").splitlines())


def _row(line: dict[str, str]) -> Published:
    return Published(
        line["table"], line["network"], line["dataset"], int(line["input"]) if line["input"] else None,
        int(line["stride"]), int(line["macs"]), int(line["params"]),
        float(line["top1"]) if line["top1"] else None, float(line["top5"]) if line["top5"] else None,
    )  # fmt: skip
