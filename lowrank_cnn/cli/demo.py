"""The command `lowrank demo`: a dense network and its low-rank twin, trained on real digits and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lowrank_cnn.cli.options import Device, Json, Limit, option
from lowrank_cnn.cli.show import console, continued_by_same_command, print_json, print_table
from lowrank_cnn.core.text import si

if TYPE_CHECKING:
    from lowrank_cnn.deploy.timing import Timing
    from lowrank_cnn.train import Record

TWINS: dict[str, str | None] = {"dense": None, "low-rank": "lr"}
"""The two networks: Network-in-Network as it is, and with each k x k conv as kx1 and 1xk side by side."""
WIDTH, BATCH = 0.25, 16


@dataclass(frozen=True)
class TwinResult:
    """The accuracy and the cost of one of the twins."""

    name: str
    top1: float
    n: int
    macs: int
    params: int
    ms_per_image: float


def demo_command(
    out: Annotated[Path, option("Directory of the two runs and the report.", "--out", "-o")] = Path("runs/demo"),
    epochs: Annotated[int | None, option("Train this many epochs instead of the recipe's.")] = None,
    device: Device = "auto",
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Train a dense network and its low-rank twin on digits, and compare them.

    It takes two to three minutes on two CPU cores and downloads nothing.

    Examples:

      lowrank demo
      lowrank demo --epochs 1 --out runs/quick
    """
    with continued_by_same_command():
        rows, report = demo(out, epochs=epochs, device=device, limit=limit, say=str if as_json else console.print)
    if as_json:
        return print_json({"rows": [vars(row) for row in rows], "report": str(report)})
    dense, low_rank = rows
    lines = [*(_line(row) for row in rows), _ratios(dense, low_rank)]
    columns = ("Network-in-Network", "accuracy", "MACs", "parameters", "time per image")
    print_table("Dense and low-rank, on digits they were not trained on", columns, lines)
    console.print(f" Accuracy on {dense.n:,} test digits; time on this CPU, measured in turns.")
    console.print(f" The report: {report}", soft_wrap=True)
    return None


def demo(
    out: str | Path,
    *,
    epochs: int | None = None,
    device: str = "auto",
    limit: int | None = None,
    say: Callable[[str], object] = str,
) -> tuple[list[TwinResult], Path]:
    """Train both twins, unless they are trained already, time them side by side and write the report.

    `say` is called with each step. Returns the rows of the table and the path of the report.
    """
    from lowrank_cnn.core.files import below
    from lowrank_cnn.report import write_report

    out = Path(out)
    records = {}
    for number, name in enumerate(TWINS, start=1):
        say(f"Training the {name} network ({number} of {len(TWINS)}), a minute or two on a CPU.")
        records[name] = _train(name, below(out, out / name), epochs, device, limit)
    times = _time(out)
    rows = [_result(name, records[name], times[name]) for name in TWINS]
    return rows, write_report([out], out / "report.html")


def _train(name: str, directory: Path, epochs: int | None, device: str, limit: int | None) -> Record:
    import torch

    from lowrank_cnn.data import open_data
    from lowrank_cnn.models import create_model
    from lowrank_cnn.train import fit

    digits = open_data("digits", limit=limit)
    torch.manual_seed(0)
    options = {"num_classes": len(digits.classes), "in_channels": 1, "width": WIDTH, "norm": "batch"}
    network = create_model("nin", scheme=TWINS[name], **options)
    again = directory.exists()  # resume a demo that was interrupted
    return fit(network, digits, "digits", epochs=epochs, device=device, out=directory, resume=again)


def _time(out: Path) -> dict[str, Timing]:
    """Time both networks in turns on the CPU, which everybody has, and write a record of each for the report."""
    from lowrank_cnn.core.environment import environment
    from lowrank_cnn.core.files import write_json
    from lowrank_cnn.deploy.timing import time_model
    from lowrank_cnn.train.evaluate import load_checkpoint

    networks = {name: load_checkpoint(out / name).network for name in TWINS}
    both = time_model(networks["low-rank"], (1, 28, 28), batch=BATCH, twin=networks["dense"])
    assert both.twin is not None
    times = {"dense": both.twin, "low-rank": replace(both, twin=None)}
    for name, timing in times.items():
        about = {"kind": "timing", "model": networks[name].config, "environment": environment()}
        write_json(out / name / "timing.json", {**about, **timing.to_dict()})
    return times


def _result(name: str, record: Record, timing: Timing) -> TwinResult:
    result = record.result
    per_image = timing.total.ms / BATCH
    return TwinResult(name, result["top1"], result["n"], result["macs"], result["params"], per_image)


def _line(row: TwinResult) -> tuple[str, ...]:
    return row.name, f"{row.top1:.1%}", si(row.macs), si(row.params), f"{row.ms_per_image:.3f} ms"


def _ratios(dense: TwinResult, low_rank: TwinResult) -> tuple[str, ...]:
    macs, params = low_rank.macs / dense.macs, low_rank.params / dense.params
    time = low_rank.ms_per_image / dense.ms_per_image
    points = 100 * (low_rank.top1 - dense.top1)
    return "low-rank / dense", f"{points:+.1f} points", f"x {macs:.2f}", f"x {params:.2f}", f"x {time:.2f}"
