"""Networks in the files of other programs: write one, and run it there. Each engine is one module and one row."""

from __future__ import annotations

import importlib
from pathlib import Path

from lowrank_cnn.deploy.engines.runner import Port, Runner
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.files import as_path

__all__ = ["ENGINES", "TRUSTED", "Port", "Runner", "open_engine"]

ENGINES = {
    ".onnx": ("onnx", "OnnxRunner", "write_onnx"),
    ".pt2": ("program", "ProgramRunner", "write_program"),
    ".ts": ("torchscript", "ScriptRunner", "write_script"),
    ".xml": ("openvino", "OpenVinoRunner", "write_openvino"),
    ".param": ("ncnn", "NcnnRunner", "write_ncnn"),
    ".mnn": ("mnn", "MnnRunner", "write_mnn"),
    ".tflite": ("litert", "LitertRunner", "write_litert"),
    ".pte": ("executorch", "ExecuTorchRunner", "write_executorch"),
}
"""By suffix: the module here, its runner, and the function that writes such a file."""
TRUSTED = (".pt2", ".ts")
"""Files whose reading can run code stored in them."""


def open_engine(path: str | Path, *, threads: int = 0, trusted: bool = False) -> Runner:
    """A network's file, ready to run on the CPU, in the engine that its suffix names.

    - `threads`: how many the engine may use; 0 leaves that to the engine.
    - `trusted`: needed for .pt2 and .ts, which torch reads by running code stored in them.

    >>> runner = open_engine("net.onnx")  # doctest: +SKIP
    >>> runner({"image": pixels})["output"].shape  # doctest: +SKIP
    (1, 10)
    """
    path = as_path(path)
    module, runner, _ = engine_of(path)
    if not path.is_file():
        raise LowRankError(f"there is no file {path}.")
    check_trusted(path, trusted)
    made = getattr(importlib.import_module(f"{__name__}.{module}"), runner)
    return made(path, threads=threads)


def is_engine_file(path: str | Path) -> bool:
    """Whether a path is that of a file which an engine runs, by its suffix."""
    return Path(path).suffix in ENGINES


def engine_of(path: Path) -> tuple[str, str, str]:
    """The row of `ENGINES` for a file."""
    if path.suffix not in ENGINES:
        known = ", ".join(ENGINES)
        raise LowRankError(f"no engine runs {path.name}: its name must end in one of {known}.")
    return ENGINES[path.suffix]


def check_trusted(path: Path, trusted: bool) -> None:
    """Refuse a file that could run code of its own, unless the user trusts it."""
    if path.suffix in TRUSTED and not trusted:
        raise LowRankError(
            f"reading {path.name} can run code stored in it: say trusted=True (--trusted) for a file of your own."
        )
