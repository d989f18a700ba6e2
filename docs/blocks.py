"""Fill the tables of README and docs from the records they come from.

    python docs/blocks.py            write them
    python docs/blocks.py --check    leave with 1 where one is out of date

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; `TABLES` says how NAME is made.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def markdown(columns: list[str], rows: list[list[object]]) -> str:
    """A table, its first column to the left and the others to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def source(path: str, environment: dict[str, Any]) -> str:
    """The line under a table: what it was measured with, and where the record is."""
    device = environment.get("gpu") or environment["cpu"]
    return f"\n*{device}, torch {environment['torch']}; record: `benchmarks/results/{path}`.*\n"


def init_depth() -> str:
    found = record("init_depth.json")
    by_name: dict[str, list[str]] = {}
    for row in found["rows"]:
        spread = f"{min(row['gradients']):.2g} to {max(row['gradients']):.2g}"
        by_name.setdefault(row["initialisation"], []).extend([f"{row['gradient']:.2g}", spread])
    columns = ["initialisation", "circular padding", "spread", "zero padding", "spread"]
    seeds = len(found["setting"]["seeds"])
    note = f"\nGeometric mean and range over {seeds} seeds.\n"
    table = markdown(columns, [[name, *values] for name, values in by_name.items()])
    return table + note + source("init_depth.json", found["environment"])


def networks() -> str:
    """Every network with its cost, counted now, beside the dense network of its family."""
    import torch

    from lowrank_cnn.count import count
    from lowrank_cnn.models import create_model, family_of, list_models
    from lowrank_cnn.paper.published import published

    rows: list[list[object]] = []
    with torch.device("meta"):
        for name in list_models():
            dense = "vgg11-gmp" if name.startswith("vgg11-") else next(iter(family_of(name).VARIANTS))
            net, twin = create_model(name), create_model(dense)
            macs = count(net, net.input_size).macs
            ratio = macs / count(twin, twin.input_size).macs
            accuracy = published()[name].top5 or published()[name].top1
            params = count(net, net.input_size).params
            rows.append(
                [f"`{name}`", f"{macs / 1e9:.3f} G", f"{ratio:.3f}", f"{params / 1e6:.2f} M", f"{accuracy:.1%}"]
            )
    columns = ["network", "MACs", "of the dense twin", "parameters", "published accuracy"]
    return (
        markdown(columns, rows)
        + "\nTop-5 on ILSVRC for VGG and GoogLeNet, top-1 on CIFAR-10 for NiN, all as published.\n"
    )


TABLES: dict[str, Callable[[], str]] = {"init-depth": init_depth, "networks": networks}


def filled(text: str) -> str:
    return BLOCK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    stale = [page for page in pages if filled(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{'out of date' if '--check' in sys.argv else 'written'}: {page.relative_to(ROOT)}")
        if "--check" not in sys.argv:
            page.write_text(filled(page.read_text()))
    sys.exit(1 if stale and "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
