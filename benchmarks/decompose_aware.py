"""How much a few images improve a decomposition: error at the same MACs by weights alone, by each step, by both.

    python -m benchmarks.decompose_aware --data FOLDER [--network nin] [--shares 0.5 0.4 0.33]
    lowrank train airbench --width 0.25 --data FOLDER --limit 10000 --recipe cifar10-fast --epochs 6 \\
        --set batch_size=256 --out runs/airbench
    python -m benchmarks.decompose_aware --data FOLDER --network runs/airbench

The network has the weights that come with the package, or is that of a run. Every way keeps the same share of its
MACs:

- weights: ranks by squared weights, filters nearest in weight;
- sensitivity: ranks by the effect on the output for the images, filters nearest in weight;
- refitted: ranks by squared weights, layers refitted to activations on the images;
- both: ranks by weights, by the effect on the output with refitted layers, and by both together, each with layers
  refitted or not; the nearest output on the images wins: `decompose(..., images=...)`.

The error is the squared difference of the outputs over their square, on test images that were not used for
fitting; top-1 is on the same images, without fine-tuning. The record has the rows of all networks measured so far.
It is written after each row, and a stopped run can be continued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import parser, write_record
from lowrank_cnn.core.files import read_json
from lowrank_cnn.core.text import text_table
from lowrank_cnn.data import make_loader, open_data
from lowrank_cnn.method.budget import Budget, within
from lowrank_cnn.method.count import count
from lowrank_cnn.method.decompose import (
    Keeps,
    both_keeps,
    curves_of,
    fit_layer,
    measured_keeps,
    nearest_output,
    outputs,
    refitted,
    relative_error,
)
from lowrank_cnn.method.rewrite import rewrite
from lowrank_cnn.method.schemes import Scheme, parse_scheme
from lowrank_cnn.method.select import select
from lowrank_cnn.train.trained import Trained, load_checkpoint, load_pretrained

Row = dict[str, Any]
WAYS = ("weights", "sensitivity", "refitted", "both")


def main() -> None:
    arguments = parser(__doc__, "decompose_aware.json")
    arguments.add_argument("--data", required=True, help="CIFAR-10")
    arguments.add_argument("--network", default="nin")
    arguments.add_argument("--scheme", default="separable")
    arguments.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.4, 0.33])
    arguments.add_argument("--images", type=int, default=128, help="training images to fit to")
    arguments.add_argument("--test", type=int, default=1000, help="test images to measure on")
    options = arguments.parse_args()
    about = {name: getattr(options, name) for name in ("scheme", "images", "test")}
    earlier = read_json(options.out) if options.out.exists() else {}
    rows: list[Row] = earlier["rows"] if all(earlier.get(name) == value for name, value in about.items()) else []
    is_run = Path(options.network).is_dir()
    trained = load_checkpoint(options.network) if is_run else load_pretrained(options.network, "cifar10")
    name = Path(options.network).name
    few, test, labels = _images(trained, options.data, options.images, options.test)
    known = [(row["way"], row["share"]) for row in rows if row["network"] == name]
    missing = [(way, share) for way in WAYS for share in options.shares if (way, share) not in known]
    for row in measure(trained.network.eval(), options.scheme, missing, few, test, labels, dense=not known):
        rows.append({"network": name, **row})
        write_record(options.out, "decompose_aware", by_line="rows", **about, rows=list(rows))
    lines = [(r["network"], r["way"], f"{r['macs']:.3f}", f"{r['error']:.4f}", f"{r['top1']:.2%}") for r in rows]
    print(text_table(("network", "way", ">of the MACs", ">error", ">top-1"), lines))


def measure(
    net: nn.Module,
    text: str,
    wanted: Sequence[tuple[str, float]],
    few: Sequence[Tensor],
    test: Sequence[Tensor],
    labels: Tensor,
    *,
    dense: bool = True,
) -> Iterator[Row]:
    """A row for each way and share of the MACs that is wanted; with `dense`, the dense network first."""
    scheme, size = parse_scheme(text), tuple(test[0].shape[1:])
    convs, kept = select(net, scheme)
    (right,), whole = outputs(net, test), count(net, size).macs
    if dense:
        yield {"way": "dense", "share": 1.0, "macs": 1.0, "error": 0.0, "top1": _top1(right, labels)}

    @cache
    def keeps(refitting: bool) -> dict[str, Keeps]:
        return measured_keeps(net, convs, scheme, few, refitting=refitting)

    def chosen(share: float, keeps: dict[str, Keeps] | None) -> dict[str, Scheme]:
        curves, rest = curves_of(net, convs, scheme, size, keeps=keeps)
        return within(net, curves, rest, Budget("macs", share), size)

    def made(schemes: dict[str, Scheme], *, refit: bool = False) -> nn.Module:
        report: dict[str, Any] = {}
        new = rewrite(net, schemes, fill=lambda *layer: report.update({layer[0]: fit_layer(*layer)}), kept=kept)
        if refit:
            refitted(net, new, report, few)
        return new

    def rivals() -> list[dict[str, Keeps] | None]:
        return [keeps(True), None, both_keeps(convs, scheme, keeps(True))]

    makers: dict[str, Callable[[float], nn.Module]] = {
        "weights": lambda share: made(chosen(share, None)),
        "sensitivity": lambda share: made(chosen(share, keeps(False))),
        "refitted": lambda share: made(chosen(share, None), refit=True),
        "both": lambda share: nearest_output(net, [chosen(share, one) for one in rivals()], few, kept=kept)[0],
    }
    for way, share in wanted:
        new = makers[way](share)
        (given,) = outputs(new, test)
        found = {"error": relative_error(given, right), "top1": _top1(given, labels)}
        yield {"way": way, "share": share, "macs": count(new, size).macs / whole, **found}


def _top1(given: Tensor, labels: Tensor) -> float:
    return float((given.view(len(labels), -1).argmax(1) == labels).double().mean())


def _images(trained: Trained, data: str, few: int, test: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Training images to fit to and test images to measure on, prepared as the network was trained."""
    found = open_data(data, limit=max(few, test))
    how: dict[str, Any] = {"preprocess": trained.preprocess, "augment": trained.augment, "train": False}
    batches = [
        list(make_loader(split, batch_size=64, seed=0, device="cpu", **how).epoch(0))
        for split in (found.train, found.test)
    ]
    fitted = torch.cat([images for images, _ in batches[0]])[:few].contiguous().split(64)
    measured = torch.cat([images for images, _ in batches[1]])[:test].contiguous().split(64)
    return list(fitted), list(measured), torch.cat([labels for _, labels in batches[1]])[:test]


if __name__ == "__main__":
    main()
