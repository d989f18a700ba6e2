"""The command `lowrank demo`: a dense network and its low-rank twin, trained on real digits and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lowrank_cnn.cli.options import Device, Json, Limit, option
from lowrank_cnn.cli.show import console, continued_by_same_command, print_json, print_table
from lowrank_cnn.core.text import si

if TYPE_CHECKING:
    from lowrank_cnn.deploy.timing import Timing

TWINS: dict[str, str | None] = {"dense": None, "low-rank": "lr"}
"""The two networks: Network-in-Network as it is, and with each k x k conv as kx1 and 1xk side by side."""
WIDTH, BATCH = 0.25, 16


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
        return print_json({"rows": rows, "report": str(report)})
    lines: list[tuple[str, ...]] = [
        (r["name"], f"{r['top1']:.1%}", si(r["macs"]), si(r["params"]), f"{r['ms_per_image']:.3f} ms")
        for r in rows
    ]
    dense, low_rank = rows
    shares = (low_rank[name] / dense[name] for name in ("macs", "params", "ms_per_image"))
    points = f"{100 * (low_rank['top1'] - dense['top1']):+.1f} points"
    lines.append(("low-rank / dense", points, *(f"x {share:.2f}" for share in shares)))
    columns = ("Network-in-Network", "accuracy", "MACs", "parameters", "time per image")
    print_table("Dense and low-rank, on digits they were not trained on", columns, lines)
    console.print(f" Accuracy on {dense['n']:,} test digits; time on this CPU, measured in turns.")
    console.print(f" The report: {report}", soft_wrap=True)
    return None


def demo(
    out: str | Path,
    *,
    epochs: int | None = None,
    device: str = "auto",
    limit: int | None = None,
    say: Callable[[str], object] = str,
) -> tuple[list[dict[str, Any]], Path]:
    """Train both twins, unless they are trained already, time them side by side and write the report.

    `say` is called with each step. Returns the rows of the table and the path of the report.
    """
    import torch

    from lowrank_cnn.core.files import below
    from lowrank_cnn.data import open_data
    from lowrank_cnn.models import create_model
    from lowrank_cnn.report import write_report
    from lowrank_cnn.train import fit

    out, results = Path(out), {}
    for number, (name, scheme) in enumerate(TWINS.items(), start=1):
        say(f"Training the {name} network ({number} of {len(TWINS)}), a minute or two on a CPU.")
        directory, digits = below(out, out / name), open_data("digits", limit=limit)
        torch.manual_seed(0)
        options = {"num_classes": len(digits.classes), "in_channels": 1, "width": WIDTH, "norm": "batch"}
        network = create_model("nin", scheme=scheme, **options)
        again = directory.exists()  # resume a demo that was interrupted
        record = fit(network, digits, "digits", epochs=epochs, device=device, out=directory, resume=again)
        results[name] = record.result
    times = _time(out)
    rows = []
    for name, found in results.items():
        cost = {key: found[key] for key in ("top1", "n", "macs", "params")}
        rows.append({"name": name, **cost, "ms_per_image": times[name].total.ms / BATCH})
    return rows, write_report([out], out / "report.html")


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
