"""Decomposing trained filters against training low-rank ones from scratch."""

from __future__ import annotations

from typing import Any

from tables.form import JsonRecord, from_record, markdown, source


@from_record("decompose.json")
def decompose(found: JsonRecord) -> str:
    """Decomposing and fine-tuning against training from scratch: a row per scheme and share of the MACs."""
    dense = next(line for line in found["table"] if line["way"] == "dense")
    ways = list(dict.fromkeys((line["way"], line["epochs"]) for line in found["table"] if line["scheme"]))
    lines = {(row["scheme"], row["share"], row["way"], row["epochs"]): row for row in found["table"]}
    rows: list[list[object]] = []
    for scheme, share in dict.fromkeys((row["scheme"], row["share"]) for row in found["table"] if row["scheme"]):
        made = [lines.get((scheme, share, *way)) for way in ways]
        first = next(row for row in made if row)
        macs, params = f"{first['macs'] / dense['macs']:.3f}", f"{first['params'] / 1e6:.2f} M"
        rows.append([f"`{scheme}`", macs, params, *map(_accuracy, made)])
    columns = ["scheme", "of the MACs", "parameters"]
    columns += [way if way == "decomposed" else f"{way}, {epochs} epochs" for way, epochs in ways]
    setting = found["setting"]
    images = "the test set" if "test" in dense else f"{setting['held_out']:,} training images held out"
    note = f"\nTop-1 on {images}: mean and standard deviation over {dense['n']} seeds.\n"
    note += f"Dense `{setting['network']}`: {dense['params'] / 1e6:.2f} M parameters, {_accuracy(dense)} after "
    note += (
        f"{dense['epochs']} epochs.\nRecipe `{setting['recipe']}` of that commit; fine-tuning starts at a rate "
    )
    note += f"of {setting['tune_lr']}.\n"
    return markdown(columns, rows) + note + source("decompose.json", found["environment"])


@from_record("decompose_aware.json")
def decompose_aware(found: JsonRecord) -> str:
    """The error of a decomposed network by weights alone, and with a few images."""
    every = [row["share"] for row in found["rows"] if row["way"] != "dense"]
    shares = (max(every), min(every))
    lines = {(row["network"], row["way"], row["share"]): row for row in found["rows"]}
    rows: list[list[object]] = []
    for network in dict.fromkeys(network for network, *_ in lines):
        for way, title in (("weights", "weights"), ("both", "weights and images")):
            own = [lines[network, way, share] for share in shares]
            rows.append([f"`{network}`", title, *(f"{row['error']:.3f} ({row['top1']:.1%})" for row in own)])
    columns = ["network", "<by", *(f"at {share:g} of the MACs" for share in shares)]
    dense = " and ".join(f"{r['top1']:.1%} (`{r['network']}`)" for r in found["rows"] if r["way"] == "dense")
    note = (
        f"\nRelative squared error of the outputs, and top-1 without fine-tuning, on {found['test']:,} test "
        f"images; dense: {dense}.\nScheme `{found['scheme']}`; {found['images']} training images to fit to, "
        "without their labels.\n"
    )
    return markdown(columns, rows) + note + source("decompose_aware.json", found["environment"])


def _accuracy(line: dict[str, Any] | None) -> str:
    """Accuracy on the test set if it was used, else on the held-out images."""
    if line is None:
        return ""
    value, spread = (line["test"], line["test_stdev"]) if "test" in line else (line["top1"], line["stdev"])
    return f"{100 * value:.2f}" + ("%" if spread is None else f" ± {100 * spread:.2f}%")
