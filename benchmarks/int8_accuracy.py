"""Top-1 accuracy of networks in int8 beside float32, on CIFAR-10's whole test set.

    python -m benchmarks.int8_accuracy --data cifar10                      # the networks of the package
    python -m benchmarks.int8_accuracy --data cifar10 --model runs/resnet  # another trained network

Each network is quantised by `lr.quantize` with 256 training images, and both run on the same test images. The
record has the number of images that only one of them classifies correctly, and from these the 95% interval of the
difference.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

import lowrank_cnn as lr
from benchmarks.cpu_engines import recorded, versions
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.files import read_json, write_json
from lowrank_cnn.data import Data, make_loader, open_data
from lowrank_cnn.models.build import run_entry
from lowrank_cnn.train.trained import Trained, load_checkpoint

RESULTS = Path(__file__).parent / "results" / "int8_accuracy.json"
SHIPPED = ("nin", "nin-c3-lr")
SUFFIXES = {"onnxruntime": ".onnx", "openvino": ".xml", "executorch": ".pte"}
BATCH = 250


@torch.no_grad()
def correct(network: torch.nn.Module, trained: Trained, data: Data) -> torch.Tensor:
    """Whether each test image is classified correctly."""
    how: dict[str, Any] = {"preprocess": trained.preprocess, "augment": trained.augment, "seed": 0}
    loader = make_loader(data.test, batch_size=BATCH, device="cpu", train=False, **how)
    return torch.cat([network(images.contiguous()).argmax(1) == labels for images, labels in loader.epoch(0)])


def paired(before: torch.Tensor, after: torch.Tensor) -> dict[str, Any]:
    """Points lost, with a 95% interval by the images that only one of the two classifies correctly."""
    n = len(before)
    lost, won = int((before & ~after).sum()), int((~before & after).sum())
    loss = 100 * (lost - won) / n
    half = 100 * 1.96 * math.sqrt(max(lost + won - (lost - won) ** 2 / n, 0)) / n
    return {
        "n": n,
        "before": before.double().mean().item(),
        "after": after.double().mean().item(),
        "only_float": lost,
        "only_int8": won,
        "loss": loss,
        "low": loss - half,
        "high": loss + half,
    }


def measured(name: str, trained: Trained, data: Data, engine: str) -> dict[str, Any]:
    """One network in one engine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"net{SUFFIXES[engine]}"
        found = lr.quantize(trained, data, path, test=BATCH)
        network = lr.load(path)
        figures = paired(correct(trained.network.eval(), trained, data), correct(network, trained, data))
    how = {"recipe": trained.recipe.name, "epochs": trained.recipe.epochs, "quantize": trained.recipe.quantize}
    return {"network": name, "engine": engine, "trained": how, "in_float": list(found.in_float), **figures}


def opened(name: str) -> tuple[str, Trained, dict[str, Any]]:
    """A network of the package, or of a run (its folder, or one of its checkpoints): with its name and images."""
    if name in SHIPPED:
        return name, lr.load_pretrained(name, "cifar10"), {}
    path = Path(name)
    trained = load_checkpoint(path)
    run = read_json((path if path.is_dir() else path.parent) / "record.json")
    entry = run_entry(trained.network)
    width = entry.get("width", 1)
    told = entry["name"] if width == 1 else f"{entry['name']}, width {width:g}"
    return told, trained, {"images": run["data"]["train"]}


def add(path: Path, row: dict[str, Any]) -> None:
    """Put a row into the record, in place of an earlier one of the same network, training and engine."""
    kept = [old for old in recorded(path) if any(old[key] != row[key] for key in ("network", "engine", "trained"))]
    write_json(path, {"environment": environment(), "versions": versions(), "rows": [*kept, row]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", nargs="+", default=list(SHIPPED), help="shipped networks, runs or checkpoints")
    parser.add_argument("--engines", nargs="+", default=["onnxruntime"], choices=list(SUFFIXES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    data = open_data(options.data, progress=False)
    for given in options.model:
        name, trained, images = opened(given)
        for engine in options.engines:
            row = measured(name, trained, data, engine)
            row["trained"] |= images
            add(options.out, row)
            print(
                f"{name} {engine}: {row['before']:.2%} to {row['after']:.2%}, {row['loss']:+.2f} points",
                flush=True,
            )


if __name__ == "__main__":
    main()
