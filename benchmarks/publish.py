"""Put the weights of finished runs into the package, in half precision, with a card that describes their training.

    python -m benchmarks.publish RUN [RUN ...] --name cifar10 [--data FOLDER]

With --data, the halved weights are evaluated on the test images, on the CPU, and the card states the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowrank_cnn.core import __version__
from lowrank_cnn.core.files import replacing
from lowrank_cnn.data import open_data
from lowrank_cnn.models.network_file import FOLDER, write_network_file
from lowrank_cnn.train.evaluate import Trained, evaluate, load_checkpoint, load_pretrained
from lowrank_cnn.train.run_folder import Record, load_record

STATED = ("top1", "top5", "n", "loss", "epochs", "macs", "params", "seconds")
SHOWN = ("commit", "date", "torch", "python", "gpu", "cpu")


def card_of(record: Record) -> dict[str, Any]:
    """The card: facts that users of the weights should know."""
    return {
        "recipe": record.recipe,
        "data": record.data,
        "seed": record.seed,
        "precision": record.precision,
        "trained": {key: record.result[key] for key in STATED},
        "environment": {key: record.environment.get(key) for key in SHOWN},
    }


def write_pretrained(trained: Trained, model: Mapping[str, Any], card: Mapping[str, Any], data: str) -> Path:
    """Store weights in the package, in half precision."""
    weights = trained.network.state_dict()
    halves = {name: t.half() if t.is_floating_point() else t for name, t in weights.items()}
    description = {
        "version": __version__,
        "model": model,
        "conversion": {"changed": []},
        "input": card["data"]["image"],
        "card": card,
        "dtype": "torch.float32",
    }
    path = FOLDER / f"{model['name']}.{data}.safetensors"
    with replacing(path) as temporary:
        write_network_file(temporary, halves, description, trained.preprocess.to_dict())
        temporary.chmod(0o644)  # safetensors writes for its owner alone, and the package is for all
    return path


def publish(run: Path, name: str, data: str | None) -> Path:
    record, trained, card = load_record(run), load_checkpoint(run), card_of(load_record(run))
    # The dropout of the recipe, where it has one, is what the network was trained with.
    dropout = record.recipe.get("dropout")
    model = record.model if dropout is None else {**record.model, "dropout": dropout}
    path = write_pretrained(trained, model, card, name)
    if data is not None:
        result = evaluate(load_pretrained(record.model["name"], name), open_data(data), device="cpu")
        path = write_pretrained(trained, model, {**card, "halved": result.to_dict()}, name)
        print(f"{path.name}: {record.result['top1']:.2%} as trained, {result.top1:.2%} in half precision")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--name", required=True, help="What the data set is called.")
    parser.add_argument("--data", help="Where its test images are.")
    arguments = parser.parse_args()
    for run in arguments.runs:
        print(publish(run, arguments.name, arguments.data).relative_to(FOLDER.parent))


if __name__ == "__main__":
    main()
