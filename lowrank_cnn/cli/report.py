"""Commands that show results: report, figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import lowrank_cnn as lr
from lowrank_cnn.cli.options import MODEL_HELP, NETWORK, Into, Json, PackageWeights, Runs, option
from lowrank_cnn.cli.show import console, errors, print_json, print_table
from lowrank_cnn.core.errors import LowRankError, check_choice
from lowrank_cnn.core.files import followed

if TYPE_CHECKING:
    from torch import nn

    from lowrank_cnn.report.records import Records


def records_in(paths: list[Path], *, say: bool = True) -> Records:
    """The records in files and folders, at least one; with `say`, files that cannot be read are named."""
    from lowrank_cnn.report.records import read_records, require_records

    records = read_records(paths)
    for problem in records.skipped if say else ():
        errors.print(f"Skipped {problem.path}: {problem.reason}")
    require_records(paths, records)
    return records


def report_command(
    runs: Annotated[list[Path] | None, typer.Argument(help="Folders or files of records; default: runs.")] = None,
    out: Annotated[Path, option("The page to write; - is standard output.", "--out", "-o")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write one HTML page about training runs and timings.

    The page holds tables and charts in one file, and loads nothing from the network. If networks of the paper are
    among the runs, its published figures are there too.

    Examples:

      lowrank report
      lowrank report runs -o report.html
    """
    from lowrank_cnn.report.page import found_in, write_page

    printed = _is_printed(out, as_json)
    records = records_in(runs or [Path("runs")])
    write_page(records, followed(out))
    if as_json:
        found = {"runs": len(records.runs), "timings": len(records.timings)}
        skipped = [vars(problem) for problem in records.skipped]
        return print_json({"page": str(out), **found, "skipped": skipped})
    if not printed:
        console.print(f"Wrote {out}: {found_in(records)}. Open it in a browser.", soft_wrap=True)
    return None


def figure_command(
    name: Annotated[str | None, typer.Argument(help="The name of a figure; without it, all are listed.")] = None,
    out: Annotated[Path | None, option(".svg, .pdf or .png; - prints SVG; else NAME.svg.", "--out", "-o")] = None,
    runs: Runs = None,
    model: Annotated[str | None, option(MODEL_HELP, panel=NETWORK)] = None,
    pretrained: PackageWeights = None,
    into: Into = None,
    seed: Annotated[int, option("Seed of an untrained network and of random images.")] = 0,
    as_json: Json = False,
) -> None:
    """Draw a figure of the paper.

    Figures are drawn from published numbers, from records of runs, or from a network.

    Examples:

      lowrank figure
      lowrank figure vgg -o vgg.svg
      lowrank figure filters --model nin-c3-lr --pretrained cifar10
      lowrank figure shapes --model runs/own --into model.py:make
    """
    from lowrank_cnn.report.figures import FIGURES, TRADE_FIGURES, draw_figure

    if name is None:
        rows = [(name, kind.shows, kind.takes) for name, kind in FIGURES.items()]
        if as_json:
            return print_json([dict(zip(("figure", "shows", "takes"), row, strict=True)) for row in rows])
        return print_table("Figures: lowrank figure NAME -o FILE.svg", ("name", "<shows", "<takes"), rows)
    place = out or Path(f"{name}.svg")
    printed = _is_printed(place, as_json)
    records = records_in(runs, say=False) if runs else None
    if into and model is None:
        raise LowRankError("--into names the network of a run: give --model as well.")
    check_choice("figure", name, FIGURES)
    kind, networks = FIGURES[name], []
    if named := model or kind.network:
        networks = _networks(named, pretrained, into, seed, twin=kind.twin)
    elif pretrained:
        raise LowRankError(f"the figure {name} takes no model and no weights.")
    draw_figure(name, followed(place), records=records, networks=networks, seed=seed)
    if as_json:
        return print_json({"figure": name, "file": str(place)})
    if not printed:
        console.print(f"Wrote {place}.", soft_wrap=True)
    if records is not None and name in TRADE_FIGURES:
        _print_left_out(records)
    return None


def _is_printed(out: Path, as_json: bool) -> bool:
    """Whether the file goes to standard output, which JSON cannot share."""
    if (printed := str(out) == "-") and as_json:
        raise LowRankError("--json and -o - both write to standard output: give one of them.")
    return printed


def _networks(
    model: str, pretrained: str | None, into: str | None, seed: int, *, twin: bool
) -> list[tuple[str, nn.Module]]:
    """The network of a figure with its title; with `twin`, after its dense twin, trained if there are weights."""
    import torch

    from lowrank_cnn.cli.source import find_model
    from lowrank_cnn.core.notes import note
    from lowrank_cnn.models.build import name_of
    from lowrank_cnn.report.records import data_label

    torch.manual_seed(seed)
    source = find_model(model, pretrained=pretrained, into=into)
    trained = f"trained on {data_label(pretrained)}" if pretrained else "trained"
    found = [(source.network, trained if source.trained else "as initialised")]
    torch.manual_seed(seed)
    if twin and (dense := source.twin()) is not None:
        known = pretrained and (name_of(dense), pretrained) in lr.list_pretrained()
        dense = lr.create_model(name_of(dense), pretrained=pretrained) if known else dense
        found.insert(0, (dense, trained if known else "as initialised"))
    for network, _ in found:
        note(network, input_size=source.input_size)
    return [(f"{name_of(network)}, {about}", network) for network, about in found]


def _print_left_out(records: Records) -> None:
    """Name the runs that a plot of error against cost omits: nothing else was trained by their recipe."""
    from lowrank_cnn.report.results import comparable, gather

    entries = [entry for entry in gather(records) if entry.runs]
    shown = comparable(entries)
    left = dict.fromkeys(f"{entry.label} by {entry.recipe}" for entry in entries if entry not in shown)
    if left:
        why = "no other network was trained by the same recipe"
        errors.print(f"Left out, since {why}: {'; '.join(left)}.")
