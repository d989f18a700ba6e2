"""The demo: a dense network and its low-rank twin, trained on real digits, compared. Minutes on two CPU cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lowrank_cnn.data import open_data
from lowrank_cnn.deploy.timing import Timing, time_model
from lowrank_cnn.models import create_model
from lowrank_cnn.models.network import Network
from lowrank_cnn.report import write_report
from lowrank_cnn.system.environment import environment
from lowrank_cnn.system.files import write_json
from lowrank_cnn.train import Record, fit
from lowrank_cnn.train.evaluation import load_checkpoint

TWINS: dict[str, str | None] = {"dense": None, "low-rank": "lr"}
"""The two networks: Network-in-Network as it is, and with each k x k conv as kx1 and 1xk side by side."""

WIDTH, BATCH = 0.25, 16


@dataclass(frozen=True)
class Row:
    """One of the twins: how good it became, and what it costs."""

    name: str
    top1: float
    n: int
    macs: int
    params: int
    ms_per_image: float


def demo(
    out: str | Path, *, epochs: int | None = None, device: str = "auto", say: Callable[[str], object] = str
) -> tuple[list[Row], Path]:
    """Train both twins (or take those trained before), time them side by side, write the report.

    `say` hears what is under way. Returns the rows of the table and the path of the report.
    """
    out = Path(out)
    records = {}
    for number, name in enumerate(TWINS, start=1):
        say(f"Training the {name} network ({number} of {len(TWINS)}), a minute or two on a CPU.")
        records[name] = _train(name, out / name, epochs, device)
    times = _time(out)
    rows = [_row(name, records[name], times[name]) for name in TWINS]
    return rows, write_report([out], out / "report.html")


def _train(name: str, directory: Path, epochs: int | None, device: str) -> Record:
    digits = open_data("digits")
    torch.manual_seed(0)
    options = {"num_classes": len(digits.classes), "in_channels": 1, "width": WIDTH, "norm": "batch"}
    network = create_model("nin", scheme=TWINS[name], **options)
    again = directory.exists()  # a demo that was cut goes on
    return fit(network, digits, "digits", epochs=epochs, device=device, out=directory, resume=again)


def _time(out: Path) -> dict[str, Timing]:
    """Both networks in turns on the CPU, which everybody has, and a record of each for the report."""
    networks: dict[str, Network] = {name: load_checkpoint(out / name).network for name in TWINS}  # type: ignore[misc]
    both = time_model(networks["low-rank"], (1, 28, 28), batch=BATCH, twin=networks["dense"])
    assert both.twin is not None
    times = {"dense": both.twin, "low-rank": replace(both, twin=None)}
    for name, timing in times.items():
        record = {
            "kind": "timing",
            "model": networks[name].config,
            **timing.to_dict(),
            "environment": environment(),
        }
        write_json(out / name / "timing.json", record)
    return times


def _row(name: str, record: Record, timing: Timing) -> Row:
    result = record.result
    per_image = timing.total.ms / BATCH
    return Row(name, result["top1"], result["n"], result["macs"], result["params"], per_image)
