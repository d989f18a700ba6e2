"""What a refactor may not change: the public surface and every count as files, exact results by digest.

    python -m tests.golden.golden --surface             # write surface.json and counts.json, which tests compare
    python -m tests.golden.golden --exact before.json   # digests of weights, resumed runs and exported files

Digests depend on the machine: write them before a refactor, again after it, and compare the two files.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import lowrank_cnn as lr
from lowrank_cnn.cli.app import COMMANDS, load_command

HERE = Path(__file__).parent
SURFACE, COUNTS = HERE / "surface.json", HERE.parents[1] / "lowrank_cnn" / "models" / "counts.json"


def surface() -> dict[str, Any]:
    """Commands with their options, and public names with their parameters."""
    return {
        "commands": {name: _options(name) for name in COMMANDS},
        "names": {name: _parameters(getattr(lr, name)) for name in lr.__all__ if name != "__version__"},
        "recipe": sorted(lr.get_recipe("modern").to_dict()),
    }


def _options(name: str) -> list[str]:
    found = []
    for parameter in load_command(name).params:
        flags = [*parameter.opts, *parameter.secondary_opts]
        found.append("/".join(flags) if parameter.param_type_name == "option" else f"<{parameter.name}>")
    return found


def _parameters(value: Any) -> list[str]:
    if isinstance(value, type) and issubclass(value, Exception):
        return []
    return list(inspect.signature(value).parameters)


def counts() -> dict[str, dict[str, Any]]:
    """The cost of every network at its own image size: `lowrank models` and `lowrank count` print this table."""
    found = {}
    for name in lr.list_models():
        with torch.device("meta"):
            network = lr.create_model(name)
        cost = lr.count(network, network.input_size).to_dict()
        layers = [list(layer.values()) for layer in cost["layers"]]  # type: ignore[attr-defined]
        found[name] = json.loads(json.dumps({**cost, "layers": layers}))
    return found


def exact() -> dict[str, str]:
    """Digests of weights after training, straight and resumed, and of exported files."""
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        place, images = Path(folder), lr.open_data("digits", limit=640)
        for name, scheme in (("nin-c3-lr", None), ("vgg11-gmp-lr-join", None), ("resnet18-small", "separable")):
            network, resumed = _small(name, scheme), _small(name, scheme)
            options: dict[str, Any] = {"recipe": "digits", "epochs": 2, "seed": 3, "progress": False}
            record = lr.fit(network, images, out=place / name, **options)
            with contextlib.suppress(KeyboardInterrupt):
                lr.fit(_small(name, scheme), images, out=place / "cut" / name, callbacks=[_stop], **options)
            lr.fit(resumed, images, out=place / "cut" / name, resume=True, **options)
            found[f"{name}: accuracy"] = f"{record.result['top1']:.6f}"
            found[f"{name}: weights"], found[f"{name}: resumed"] = _digest(network), _digest(resumed)
            trained = network.eval()
            example = torch.randn(1, 1, 28, 28, generator=torch.Generator().manual_seed(0))
            found[f"{name}: merged"] = _digest(lr.merge(trained, example_input=example))
            for suffix in ("onnx", "ts", "tflite"):
                path = place / f"{name}.{suffix}"
                lr.export(trained, path, example_input=example)
                found[f"{name}: {suffix}"] = _outputs(path, example)
        dense = _small("nin", None)
        found["decomposed"] = _digest(lr.decompose(dense, "lr-join"))
        found["thin"] = str(lr.count(lr.thin(dense, macs=0.5, input_size=(1, 28, 28)), (1, 28, 28)).macs)
    return found


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def _small(name: str, scheme: str | None) -> torch.nn.Module:
    torch.manual_seed(7)
    network = lr.create_model(name, num_classes=10, in_channels=1, image_size=28, width=0.125)
    return network if scheme is None else lr.convert(network, scheme)


def _digest(network: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _outputs(path: Path, example: torch.Tensor) -> str:
    """A file by what it computes: writers may put dates or paths into its bytes."""
    return hashlib.sha256(lr.load(path, trusted=True)(example).detach().numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--surface", action="store_true")
    parser.add_argument("--exact", type=Path)
    asked = parser.parse_args()
    if asked.surface:
        SURFACE.write_text(json.dumps(surface(), indent=1) + "\n")
        lines = (f"{json.dumps(name)}: {json.dumps(cost)}" for name, cost in counts().items())
        COUNTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if asked.exact:
        asked.exact.write_text(json.dumps(exact(), indent=1) + "\n")


if __name__ == "__main__":
    main()
