"""Hostile input: damaged bytes, changed values, odd names, and files that stand for more than they hold."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import socket
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import lowrank_cnn as lr
from lowrank_cnn.data import Data
from lowrank_cnn.train.run_folder import Checkpoint, Record

OPTIONS = (
    "num_classes", "in_channels", "width", "norm", "stride", "scheme", "dropout", "image_size", "pool", "init",
    "pretrained",
)  # fmt: skip
NUMBERS = (0, -1, 1, 3, 1.5, 10**9, 2**63, 10**40, -(10**40), 1e308, float("nan"), float("inf"))
TEXTS = (
    "", " ", "nin", "cifar10", "digits", "a/b", "../x", "lr(kx1=1e9999999)", "embed(to=1e400)", "9" * 5000, "\0",
    "\ud800", "\x1b[2J", "n" * 300, "~nobody/x", "/dev/zero", "/proc/self/mem", "[1, 2", "batch", "None", "1e400",
)  # fmt: skip


def value(draw: random.Random, depth: int = 2) -> Any:
    """A value of any type."""
    kind = draw.randrange(10 if depth else 7)
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind < 5:
        return draw.choice(TEXTS)
    if kind < 7:
        return draw.choice((None, True, False, b"bytes", "x" * draw.randrange(20)))
    if kind < 9:
        return [value(draw, depth - 1) for _ in range(draw.randrange(5))]
    return {str(draw.choice(TEXTS)): value(draw, depth - 1) for _ in range(draw.randrange(4))}


def changed(values: Any, draw: random.Random) -> Any:
    """A JSON value with one or more of its parts replaced, removed or repeated."""
    for _ in range(draw.randint(1, 3)):
        values = _change(values, draw)
    return values


def _change(values: Any, draw: random.Random) -> Any:
    if isinstance(values, dict) and values and draw.random() < 0.9:
        key = draw.choice(list(values))
        how = draw.randrange(6)
        if how == 0:
            return {k: v for k, v in values.items() if k != key}
        if how == 1:
            return {**values, draw.choice(TEXTS): value(draw)}
        return {**values, key: _change(values[key], draw)}
    if isinstance(values, list) and values and draw.random() < 0.7:
        place = draw.randrange(len(values))
        return [*values[:place], _change(values[place], draw), *values[place + draw.randrange(2) :]]
    return value(draw)


def write_value(path: Path, content: Any, draw: random.Random) -> None:
    """Write a value as JSON, at times deeper than any reader goes."""
    text = json.dumps(content, default=str)
    if draw.random() < 0.05:
        text = '{"kind": ' + "[" * draw.choice((900, 50_000)) + text
    path.write_text(text)


def damage(path: Path, draw: random.Random) -> None:
    """Change a file's bytes, or put something else in its place."""
    content = bytearray(path.read_bytes())
    how = draw.randrange(10)
    if how < 4 and content:
        for _ in range(draw.choice((1, 1, 1, 8))):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == 4:
        del content[draw.randrange(len(content) + 1) :]
    elif how == 5:
        content[draw.randrange(len(content) + 1) :] = draw.randbytes(draw.randrange(200))
    elif how == 6:
        content[:0] = draw.choice((b"\xff\xfe", b"\0", b"PK\x03\x04", b"\x80\x04", b"\x1f\x8b"))
    elif how == 7:
        content[: draw.randrange(len(content) + 1)] = b""
    else:
        path.unlink()
        with suppress(OSError):
            draw.choice((path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")))()
        return
    path.write_bytes(content)


def record() -> Record:
    history = [{"epoch": 1, "lr": 0.1, "train_loss": 1.5, "train_accuracy": 0.5, "accuracy": 0.25,
                "seconds": 1.0, "images_per_second": 9.0}]  # fmt: skip
    data = {"name": "digits", "classes": ["a", "b"], "train": 10, "test": 4, "image": [1, 8, 8]}
    result = {"top1": 0.5, "top5": 0.9, "loss": 1.0, "n": 4, "macs": 10, "params": 5, "seconds": 1.0}
    return Record(
        {"name": "nin"}, {"lr": 0.1, "name": "x"}, data, 3, "test", "fp32", "cpu", history=history, result=result,
        status="finished", environment={"torch": "2"},
    )  # fmt: skip


def checkpoint(number: float = 1.0) -> Checkpoint:
    tensors = {"model.weight": torch.full((2, 3), number), "random.0.torch": torch.arange(5)}
    return Checkpoint(tensors, {"epoch": 3, "history": [{"loss": None}]})


@cache
def exported() -> bytes:
    """A small network as `export` writes it."""
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "net.safetensors"
        network = lr.create_model("nin-c3-lr", num_classes=3, width=0.05)
        lr.export(network, path)
        return path.read_bytes()


def change_header(path: Path, draw: random.Random) -> None:
    """Change the description of a network in the header of its .safetensors."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    about = header.get("__metadata__", {})
    if draw.random() < 0.8 and about:
        key = draw.choice(list(about))
        try:
            inner = json.loads(about[key])
        except ValueError:
            inner = about[key]
        about[key] = json.dumps(changed(inner, draw), default=str)
    else:
        header = changed(header, draw)
    written = json.dumps(header, default=str).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + size :])


def onnx(draw: random.Random) -> bytes:
    """An .onnx file with none, one or two inputs, of any type."""
    from onnx import TensorProto, helper

    kinds = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.STRING)
    shape = draw.choice(([1, 3, 8, 8], ["n", 3, 8, 8], [], [1, 3], ["n", "c", "h", "w"], [2**31, 3, 8, 8]))
    given = [helper.make_tensor_value_info(f"x{i}", draw.choice(kinds), shape) for i in range(draw.randrange(3))]
    if given:
        node = helper.make_node("Identity", ["x0"], ["y"])
        out = helper.make_tensor_value_info("y", given[0].type.tensor_type.elem_type, None)
    else:
        constant = helper.make_tensor("c", TensorProto.FLOAT, [1], [1.0])
        node = helper.make_node("Constant", [], ["y"], value=constant)
        out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", given, [out])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made.SerializeToString()


class Planted:
    """Its pickle writes a file when it is read."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.canary),)


def planted_pickle(canary: Path) -> bytes:
    return pickle.dumps(Planted(canary))


def image(draw: random.Random, kind: str) -> bytes:
    """A small image of a format, whole or damaged, or one that claims to be very large."""
    mode = draw.choice(("RGB", "L", "RGBA", "P", "1", "CMYK" if kind == "JPEG" else "L"))
    side = draw.choice((1, 8, 8, 8, 33))
    made = Image.fromarray(np.random.default_rng(draw.randrange(99)).integers(0, 255, (side, side, 3), np.uint8))
    made = made.convert(mode if kind == "PNG" or mode in ("RGB", "L") else "RGB")
    out = io.BytesIO()
    made.save(out, kind)
    content = bytearray(out.getvalue())
    if draw.random() < 0.5:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    if draw.random() < 0.2:
        del content[draw.randrange(len(content)) :]
    if draw.random() < 0.1 and kind == "PNG":
        content[16:24] = (60_000).to_bytes(4) * 2
    return bytes(content)


def write_folder(place: Path, draw: random.Random) -> None:
    """Images of two classes to train and test on, some of them hostile."""
    names = [b"one", b"two\xff", b"\x1b[2J", "\u202e".encode(), b"x" * 255, b"."]
    for split in ("train", draw.choice(("test", "val"))):
        for name in draw.sample(names[:5], 2):
            below = os.fsencode(place) + f"/{split}/".encode() + name
            Path(os.fsdecode(below)).mkdir(parents=True)
            for number in range(draw.randrange(4)):
                kind = draw.choice(("PNG", "JPEG", "BMP", "GIF"))
                path = Path(os.fsdecode(below + f"/{number}.{kind.lower()}".encode()))
                path.write_bytes(image(draw, kind))
                if draw.random() < 0.2:
                    damage(path, draw)


def write_shards(place: Path, draw: random.Random) -> None:
    """Parquet shards of images and labels, some of them hostile."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = draw.choice((0, 1, 4, 4, 4, 9))
    for split in ("train", draw.choice(("test", "validation"))):
        pictures = [image(draw, draw.choice(("PNG", "JPEG"))) for _ in range(rows)]
        labels = pa.array([draw.choice((0, 1, None, 100)) for _ in range(rows)], pa.int64())
        kind = draw.choice((pa.int64(), pa.int8(), pa.uint64(), pa.string(), pa.float32(), pa.int64()))
        columns: dict[str, Any] = {"image": pa.array(pictures, pa.binary()), "label": labels.cast(kind)}
        for extra in draw.sample(("image", "label", "other"), 1) if draw.random() < 0.1 else ():
            columns.pop(extra, None)
        features = changed({"info": {"features": {"label": {"names": ["a", "b"]}}}}, draw)
        table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(features, default=str)})
        parts = draw.choice(("00001", "00001", "00001", "00003", "99999999999", "0" * 99 + "1"))
        path = place / f"{split}-00000-of-{parts}.parquet"
        pq.write_table(table, path, compression=draw.choice(("snappy", "zstd", "none")))
        if draw.random() < 0.5:
            damage(path, draw)
        elif draw.random() < 0.1:
            path.write_bytes(draw.choice(bombs()))


@cache
def bombs() -> tuple[bytes, ...]:
    """Parquet files of few bytes for much data: rows of nothing, and one large value for all rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    many, few = 32_000_000, 4000
    large = pa.DictionaryArray.from_arrays(pa.array([0] * few, pa.int32()), pa.array([bytes(2**20)], pa.binary()))
    tables = (
        {"image": pa.nulls(many, pa.binary()), "label": pa.nulls(many, pa.int64())},
        {"image": pa.nulls(300_000, pa.binary()), "label": pa.nulls(300_000, pa.int64())},
        {"image": large, "label": pa.array([0] * few)},
    )
    written = []
    for columns in tables:
        out = io.BytesIO()
        pq.write_table(pa.table(columns), out, store_schema=False)
        written.append(out.getvalue())
    return tuple(written)


@cache
def trained() -> torch.nn.Module:
    """A network that can classify images."""
    return lr.create_model("nin-c3-lr", pretrained="cifar10")


def special(path: Path, draw: random.Random) -> Path:
    """Put a pipe, a socket or a device under a name, or a link to one beside it; the path of the thing itself."""
    thing = path if draw.random() < 0.5 else path.with_name("special")
    kind = draw.choice(("pipe", "socket", "device"))
    if kind == "socket":
        socket.socket(socket.AF_UNIX).bind(thing.name)  # the whole path may be too long for a socket
    else:
        try:
            os.mknod(thing, stat.S_IFCHR | 0o600 if kind == "device" else stat.S_IFIFO, os.makedev(1, 5))
        except PermissionError:  # devices are made by root
            os.mkfifo(thing)
    if thing != path:
        path.symlink_to(thing)
    return thing


def look_at(data: Data) -> None:
    """Read the images of a set."""
    for split in (data.train, data.test):
        for _ in split.pixels():
            break
        str(split.problems)
    data.digest  # noqa: B018


def scheme_text(draw: random.Random) -> str:
    """A text near the grammar of schemes."""
    pieces = (
        "lr", "lr-join", "dense", "embed", "(", ")", "kx1", "1xk", "kxk", "=", ",", "join", "to", "0.5", "1/3",
        "1e9999999", "1e400", "9" * 40, "-1", "nan", "inf", " ", "\ud800", "0", "true", "3", "0x10", "1_0",
        "groups",
    )  # fmt: skip
    return "".join(draw.choice(pieces) for _ in range(draw.randint(1, 12)))


def path(draw: random.Random) -> Any:
    """What can be given as a path: too long, not UTF-8, of other users, of other types."""
    odd = (
        "n" * 256, "a/" + "b" * 300, "~nouser/x", "\0", os.fsdecode(b"\xff\xfe"), "\ud800", "/dev/zero",
        "/dev/null",
        "/proc/self/mem", ".", "", "x.onnx", "x.safetensors", "/" * 5000 + "x", "a\nb",
    )  # fmt: skip
    return draw.choice((*odd, value(draw)))
