"""The card beside an exported network: what it is, what it takes, how exact it is, and how to run it."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

from lowrank_cnn.deploy.engines import Runner, open_engine
from lowrank_cnn.deploy.engines.targets import TARGETS, usage
from lowrank_cnn.system.files import write_atomically
from lowrank_cnn.system.text import si


def write_export_card(
    path: Path, name: str, *, macs: int, error: float | None, precision: str, accuracy: str = ""
) -> Path:
    """Write FILE.md beside a file that was exported just now."""
    runner = open_engine(path, trusted=True)
    card = path.with_name(f"{path.name}.md")
    lines = [f"# {name}, {precision}, for {runner.engine} {_version(path)}", ""]
    lines += [f"- {si(macs)} multiply-accumulates an image"]
    lines += [f"- takes {_ports(runner.inputs)}", f"- gives {_ports(runner.outputs)}"]
    lines += [f"- differs from the network in torch by {error:.1e} of the largest output at most"] if error else []
    lines += [f"- {accuracy}"] if accuracy else []
    lines += _preparation(runner)
    lines += ["", "```python", usage(runner, path.name, precision=precision), "```", ""]
    write_atomically(card, "\n".join(lines).encode())
    return card


def _preparation(runner: Runner) -> list[str]:
    """How images are prepared and what the outputs are called, as far as the file tells."""
    found = []
    for key, words in (("mean", "subtract the mean"), ("std", "divide by the deviation"), ("classes", "classes")):
        if value := runner.metadata.get(key):
            found.append(f"- {words}: {', '.join(map(str, json.loads(value)))}")
    return found


def _ports(ports: tuple[object, ...]) -> str:
    return "; ".join(f"{port.name} of {port} in {port.dtype}" for port in ports)  # type: ignore[attr-defined]


def _version(path: Path) -> str:
    package = next(target.package for target in TARGETS.values() if target.suffix == path.suffix)
    return importlib.metadata.version(package)
