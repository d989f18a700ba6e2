"""The small training run that faults are injected into, in a forked process, and what came of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.deploy import quantize as quantizing
from lowrank_cnn.train import Interrupted, Recipe, fit, load_record
from lowrank_cnn.train.trained import load_checkpoint
from tests.train.driver import STATEFUL, tiny_data, tiny_net

RECIPE = replace(STATEFUL, name="faults", epochs=3, preprocess="whiten")
"""Every kind of state: dropout, batch norm, moving average, level-off, random crops, whitening."""
FINISHED, CRASHED, REFUSED, STOPPED = 0, 1, 3, 4
TIMES = ("seconds", "images_per_second")
PATIENCE = 600.0
"""Seconds after which a process counts as hung; one run takes about two on an idle core."""


def files(folder: Path) -> list[Path]:
    """The same images as files in `folder/images`, written now."""
    found = []
    for part, split in (("train", tiny_data().train), ("test", tiny_data().test)):
        for number, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
            found.append(folder / "images" / part / str(int(label)) / f"{number:02}.bmp")
            found[-1].parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(found[-1])
    return found


def train(folder: Path, seed: int = 0) -> None:
    """Train, or go on, in `folder/run`, with the cache in `folder/cache`; a checkpoint follows every step."""
    _fit(folder, tiny_data(), RECIPE, seed)


def stream(folder: Path, seed: int = 0) -> None:
    """The same with images that two workers read from files, which are written first if they are not there."""
    if not (folder / "images").exists():
        files(folder)
    data = open_data(folder / "images", resident_bytes=0, progress=False)
    _fit(folder, data, replace(RECIPE, preprocess="standardize"), seed, workers=2)


def _fit(folder: Path, data: Data, recipe: Recipe, seed: int, **options: Any) -> None:
    os.environ["LOWRANK_CACHE"] = str(folder / "cache")
    options |= {"out": folder / "run", "resume": True, "checkpoint_every": 0.0, "device": "cpu"}
    fit(tiny_net(stateful=True, seed=seed), data, recipe, seed=seed, **options)


def export(folder: Path, seed: int = 0) -> None:
    """Write the finished run to `folder/net.tflite` in int8: the better one of two rejected candidates."""
    trained = load_checkpoint(folder / "run", network=tiny_net(stateful=True))
    quantizing._TRIES = 1
    quantizing.quantize(trained, tiny_data(), folder / "net.tflite", images=16, most_loss=-100.0, overwrite=True)


def start_all(folder: Path, work: str) -> list[int]:
    """Start a run: two processes that train together if the work is "ranks", else one."""
    if work != "ranks":
        return [start(folder, work=work)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["TORCHELASTIC_RUN_ID"] = "faults"  # as torchrun sets them
    return [
        start(folder, partial(os.environ.update, shared | {"RANK": rank, "LOCAL_RANK": rank})) for rank in "01"
    ]


def wait_all(children: list[int]) -> int | None:
    """How several processes ended: None if one hung, else the worst code."""
    ends = [wait(child) for child in children]
    return None if None in ends else CRASHED if CRASHED in ends else max(ends)


def start(folder: Path, before: Callable[[], object] = lambda: None, seed: int = 0, work: str = "train") -> int:
    """Fork a process that does some work: its number. `before` runs in it first; its output goes to a file."""
    child = os.fork()
    if child:
        return child
    code = CRASHED
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)  # pytest has put its own files there
        before()
        globals()[work](folder, seed)
        code = FINISHED
    except LowRankError as error:
        print(f"refused: {error}", flush=True)
        code = REFUSED
    except Interrupted:
        code = STOPPED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(child: int, patience: float = PATIENCE) -> int | None:
    """How a process ended: one of the codes above, minus the number of the signal, or None if it hung."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def result(folder: Path) -> tuple[dict, list]:
    """The last weights and state, and the history without its times. The times of image files do not count."""
    loaded = load_file(max((folder / "run").glob("step-*.safetensors")))
    tensors = {name: tensor for name, tensor in loaded.items() if not name.startswith("images.")}
    history = load_record(folder / "run").history
    return tensors, [{k: v for k, v in row.items() if k not in TIMES} for row in history]


def same(one: tuple[dict, list], other: tuple[dict, list]) -> bool:
    """Whether two runs ended with the same bits."""
    tensors, others = one[0], other[0]
    return (
        tensors.keys() == others.keys()
        and all(torch.equal(tensors[name], others[name]) for name in tensors)
        and one[1] == other[1]
    )


def checkpoints(folder: Path) -> int:
    """The number of complete pairs in a run's folder."""
    return len(list((folder / "run").glob("step-*.json")))


def newest(folder: Path) -> int:
    """The iteration of the newest checkpoint, -1 before there is one."""
    return max((int(path.stem[5:]) for path in (folder / "run").glob("step-*.json")), default=-1)


def said(folder: Path) -> str:
    """What the processes of a folder have printed."""
    log = folder / "log"
    return log.read_text(errors="replace") if log.exists() else ""


def recorded_seed(folder: Path) -> int:
    """The seed that the record states."""
    return json.loads((folder / "run" / "record.json").read_text())["seed"]
