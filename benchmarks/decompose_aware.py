"""What a few images are worth to a decomposition: error at the same MACs by weights alone, by each step, by both.

    python -m benchmarks.decompose_aware --data FOLDER [--network nin] [--shares 0.5 0.4 0.33]

The network has the weights that come with the package. Every way keeps the same share of its MACs:

- weights: ranks by squared weights, filters nearest in weight;
- sensitivity: ranks by what the output keeps on the images, filters nearest in weight;
- refitted: ranks by squared weights, layers refitted to activations on the images;
- both: ranks by what the output keeps with refitted layers, then refitted: `decompose(..., images=...)`.

The error is the squared difference of the outputs over their square, on test images that nothing was fitted to;
top-1 is on the same images, without fine-tuning.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.data import make_loader, open_data
from lowrank_cnn.method.activations import outputs, relative_error
from lowrank_cnn.method.budget import Budget, within
from lowrank_cnn.method.counting import count
from lowrank_cnn.method.decomposing import fit_layer, refitted
from lowrank_cnn.method.ranks import curves_of
from lowrank_cnn.method.rewriting import rewrite
from lowrank_cnn.method.scheme import Scheme, parse_scheme
from lowrank_cnn.method.selection import select
from lowrank_cnn.method.sensitivity import measured_keeps
from lowrank_cnn.system.environment import environment
from lowrank_cnn.system.text import text_table
from lowrank_cnn.train.trained import Trained, load_pretrained

OUT = Path(__file__).parent / "results" / "decompose_aware.json"
WAYS = ("weights", "sensitivity", "refitted", "both")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", required=True, help="CIFAR-10.")
    parser.add_argument("--network", default="nin")
    parser.add_argument("--scheme", default="separable")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.4, 0.33])
    parser.add_argument("--images", type=int, default=256, help="Training images to fit to.")
    parser.add_argument("--test", type=int, default=1000, help="Test images to measure on.")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    trained = load_pretrained(options.network, "cifar10")
    few, test, labels = _images(trained, options.data, options.images, options.test)
    rows = list(measure(trained.network.eval(), options.scheme, options.shares, few, test, labels))
    about = {name: getattr(options, name) for name in ("network", "scheme", "images", "test")}
    options.out.write_text(json.dumps({"environment": environment(), **about, "rows": rows}, indent=1) + "\n")
    columns = ("way", ">of the MACs", ">error", ">top-1")
    print(
        text_table(
            columns, [(r["way"], f"{r['macs']:.3f}", f"{r['error']:.4f}", f"{r['top1']:.2%}") for r in rows]
        )
    )


def measure(
    net: nn.Module,
    text: str,
    shares: Sequence[float],
    few: Sequence[Tensor],
    test: Sequence[Tensor],
    labels: Tensor,
) -> list[dict[str, Any]]:
    """A row for each way at each share of the MACs, the dense network first."""
    scheme, size = parse_scheme(text), tuple(test[0].shape[1:])
    convs, kept = select(net, scheme)
    right, dense = outputs(net, test), count(net, size).macs
    blind = measured_keeps(net, convs, scheme, few, refitting=False)
    seeing = measured_keeps(net, convs, scheme, few)
    rows = [{"way": "dense", "share": 1.0, "macs": 1.0, "error": 0.0, "top1": _top1(right, labels)}]

    def chosen(share: float, keeps: dict | None) -> dict[str, Scheme]:
        curves, rest = curves_of(net, convs, scheme, size, keeps=keeps)
        return within(net, curves, rest, Budget("macs", share), size)

    def plain(schemes: dict[str, Scheme], *, refit: bool = False) -> nn.Module:
        report: dict[str, Any] = {}
        new = rewrite(net, schemes, fill=lambda *layer: report.update({layer[0]: fit_layer(*layer)}), kept=kept)
        if refit:
            refitted(net, new, report, few)
        return new

    makers: dict[str, Callable[[float], nn.Module]] = {
        "weights": lambda share: plain(chosen(share, None)),
        "sensitivity": lambda share: plain(chosen(share, blind)),
        "refitted": lambda share: plain(chosen(share, None), refit=True),
        "both": lambda share: plain(chosen(share, seeing), refit=True),
    }
    for share in shares:
        for way in WAYS:
            new = makers[way](share)
            given = outputs(new, test)
            cost = count(new, size).macs / dense
            found = {"error": relative_error(given, right), "top1": _top1(given, labels)}
            rows.append({"way": way, "share": share, "macs": cost, **found})
    return rows


def _top1(given: Tensor, labels: Tensor) -> float:
    return float((given.argmax(1) == labels).double().mean())


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
