"""Helpers for tests of several rooms: load a file, call a function here or in a forked process."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def load_file(path: str) -> ModuleType:
    """A file of the checkout, which is no part of a package, as a module."""
    place = ROOT / path
    spec = importlib.util.spec_from_file_location(place.stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_equal_weights(one: Any, other: Any) -> None:
    """Assert that two networks, or dictionaries of tensors, have the same names and bits."""
    ours, theirs = (dict(x if isinstance(x, dict) else x.state_dict()) for x in (one, other))
    assert ours.keys() == theirs.keys()
    assert [
        name for name, value in ours.items() if value.dtype != theirs[name].dtype or not value.equal(theirs[name])
    ] == []


def squares(train: int, test: int, side: int) -> Any:
    """Dark and bright grey squares in turns."""
    import torch

    from lowrank_cnn.data import Data, ResidentSplit

    def split(n: int) -> ResidentSplit:
        labels = torch.arange(n) % 2
        images = torch.randint(0, 90, (n, 1, side, side), generator=torch.Generator().manual_seed(n))
        return ResidentSplit.of((images + 150 * labels[:, None, None, None]).to(torch.uint8), labels)

    return Data("squares", ("dark", "bright"), split(train), split(test))


def called_here(file: str, function: str, *asked: Any) -> Any:
    """Do what `core.processes.apart` does, but in this process: a new one imports torch first."""
    module = next(known for known in list(sys.modules.values()) if getattr(known, "__file__", None) == file)
    return json.loads(json.dumps(getattr(module, function)(*json.loads(json.dumps(asked)))))


class Forked:
    """A function in a process of its own, with its output in pipes: a new Python would first import torch."""

    def __init__(self, function: Callable[[], object]) -> None:
        importlib.import_module("torch._dynamo")  # else every process that trains would import these two
        importlib.import_module("lowrank_cnn.train.distributed").import_fabric()
        (out, to_out), (errors, to_errors) = os.pipe(), os.pipe()
        self.number, self.code = os.fork(), None
        if not self.number:
            os.dup2(to_out, 1)
            os.dup2(to_errors, 2)
            for pipe in (out, to_out, errors, to_errors):
                os.close(pipe)
            _call_and_exit(function)
        os.close(to_out)
        os.close(to_errors)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(errors)

    def send_signal(self, number: int) -> None:
        os.kill(self.number, number)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.code is None:
            number, status = os.waitpid(self.number, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if number else None
        return self.code

    def wait(self) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.number, 0)[1])
        return self.code

    def close(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
            self.wait()
        self.stdout.close()
        self.stderr.close()


def _call_and_exit(function: Callable[[], object]) -> None:
    code: object = 1
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        function()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


@contextlib.contextmanager
def locked_elsewhere(directory: Path) -> Iterator[None]:
    """A directory that another process holds."""
    code = (
        "import sys, time, pathlib\n"
        "from lowrank_cnn.core.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield
    process.kill()
    process.wait()


def node_macs(path: str | Path) -> dict[str, int]:
    """The multiply-accumulates of each node of an .onnx file for one image, from its graph."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(onnx.load(str(path))).graph
    weights = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    values = [*graph.value_info, *graph.output]
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in values}
    found: dict[str, int] = {}
    for node in graph.node:
        weight = weights.get(node.input[1]) if len(node.input) > 1 else None
        if node.op_type == "Conv" and weight:
            found[node.name] = prod(weight) * prod(shapes[node.output[0]][2:])
        elif node.op_type in ("Gemm", "MatMul") and weight:
            found[node.name] = prod(weight)
    return found
