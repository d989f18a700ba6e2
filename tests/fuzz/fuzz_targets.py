"""One function per reader: it makes a hostile input from a random generator, and reads it.

A reader that accepts damaged input must give what was written; a target raises `Accepted` where it does not.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_inputs as inputs
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.choose.frontier import Frontier
from lowrank_cnn.cli.train import read_config
from lowrank_cnn.core.cache import JsonCache
from lowrank_cnn.core.files import as_path, below, locked, write_atomically
from lowrank_cnn.data.folders import read_class_names
from lowrank_cnn.data.store import fingerprint_of_files
from lowrank_cnn.report import read_records
from lowrank_cnn.train import get_recipe, load_record
from lowrank_cnn.train.recipe import Recipe, parse_settings
from lowrank_cnn.train.run_folder import RunDirectory, read_checkpoint


class Accepted(Exception):
    """Damaged input was accepted, and gave another result."""


def record(place: Path, draw: random.Random) -> None:
    """The record of a run, its bytes or its values changed."""
    sample = inputs.record()
    path = place / "record.json"
    sample.save(path)
    if draw.random() < 0.5:
        inputs.damage(path, draw)
        if load_record(path) != sample:
            raise Accepted
        return
    values = json.loads(path.read_text())
    values.pop("sha256")
    inputs.write_value(path, inputs.changed(values, draw), draw)
    load_record(path)


def report(place: Path, draw: random.Random) -> None:
    """Any JSON in a folder of records."""
    sample = inputs.record()
    sample.save(place / "record.json")
    values = json.loads((place / "record.json").read_text())
    if draw.random() < 0.5:
        values.pop("sha256")
    inputs.write_value(place / "record.json", inputs.changed(values, draw), draw)
    if draw.random() < 0.3:
        inputs.damage(place / "record.json", draw)
    read_records([place])


def checkpoint(place: Path, draw: random.Random) -> None:
    """One of the two files of a checkpoint, damaged."""
    RunDirectory(place).save(inputs.checkpoint(), 1)
    inputs.damage(place / f"step-00000001.{draw.choice(('json', 'safetensors'))}", draw)
    back = read_checkpoint(place / "step-00000001")
    if not torch.equal(back.tensors["model.weight"], inputs.checkpoint().tensors["model.weight"]):
        raise Accepted


def resumed(place: Path, draw: random.Random) -> None:
    """The newest checkpoint damaged: the one before it is used."""
    RunDirectory(place).save(inputs.checkpoint(1.0), 1)
    RunDirectory(place).save(inputs.checkpoint(2.0), 2)
    inputs.damage(place / f"step-00000002.{draw.choice(('json', 'safetensors'))}", draw)
    found = RunDirectory(place).latest(lambda _: None)
    if found is None or found.tensors["model.weight"].unique().item() not in (1.0, 2.0):
        raise Accepted


def times(place: Path, draw: random.Random) -> None:
    """A cache of entries, damaged: it counts as empty."""
    path = place / "plans.json"
    first = JsonCache(path, key="plans", valid=lambda entry: isinstance(entry, dict))
    first["block"] = {"as given": 0.25}
    first.save()
    inputs.damage(path, draw)
    found = JsonCache(path, key="plans", valid=lambda entry: isinstance(entry, dict))
    if found.entries not in ({}, {"block": {"as given": 0.25}}):
        raise Accepted
    found["other"] = {"as given": 1.0}
    found.save()


def network_file(place: Path, draw: random.Random) -> None:
    """An exported .safetensors, its bytes or its description changed."""
    path = place / "net.safetensors"
    path.write_bytes(inputs.exported())
    if draw.random() < 0.5:
        inputs.damage(path, draw)
    else:
        inputs.change_header(path, draw)
    lr.load(path)


def onnx_file(place: Path, draw: random.Random) -> None:
    """An .onnx file of other inputs and types, or a damaged one."""
    path = place / "net.onnx"
    path.write_bytes(inputs.onnx(draw))
    if draw.random() < 0.5:
        inputs.damage(path, draw)
    network = lr.load(path)
    network(torch.zeros(1, 3, 8, 8))


def program(place: Path, draw: random.Random) -> None:
    """A pickle under any name that a network can have: it is never run."""
    path = place / draw.choice(("net.pt2", "net.safetensors", "net.pt", "net.onnx", "step-00000001.safetensors"))
    path.write_bytes(inputs.planted_pickle(place.parent / "canary"))
    lr.load(path)


def shards(place: Path, draw: random.Random) -> None:
    """Parquet shards: damaged, or of odd values, types and names."""
    inputs.write_shards(place, draw)
    data = lr.open_data(place, limit=draw.choice((None, 1, 10)))
    inputs.look_at(data)


def folder(place: Path, draw: random.Random) -> None:
    """A folder of images: damaged, of odd names, FIFOs, links to devices."""
    inputs.write_folder(place, draw)
    inputs.look_at(lr.open_data(place, limit=10))


def source(place: Path, draw: random.Random) -> None:
    """Anything in place of the name of a data set."""
    lr.open_data(
        inputs.value(draw), **{draw.choice(("limit", "bad", "channels", "image_size")): inputs.value(draw)}
    )


def scheme(place: Path, draw: random.Random) -> None:
    """Texts near those that name schemes, and values of any type."""
    text = inputs.scheme_text(draw) if draw.random() < 0.9 else inputs.value(draw)
    lr.parse_scheme(text).stages((3, 3), 64)


def model(place: Path, draw: random.Random) -> None:
    """A network with options of any type."""
    options = {draw.choice(inputs.OPTIONS): inputs.value(draw) for _ in range(draw.randint(1, 2))}
    name = draw.choice(("nin", "nin-c3-lr", "vgg11-gmp", inputs.value(draw)))
    with torch.device("meta"):
        lr.create_model(name, **options)


def counted(place: Path, draw: random.Random) -> None:
    """A count for an input of any kind."""
    lr.count(draw.choice((nn.Conv2d(3, 8, 3), inputs.value(draw))), inputs.value(draw))


def recipe(place: Path, draw: random.Random) -> None:
    """Settings of any text, and stored recipes of any values."""
    if draw.random() < 0.5:
        field = draw.choice((*get_recipe("modern").to_dict(), "surprise"))
        get_recipe("modern", **parse_settings([f"{field}={inputs.value(draw)}"]))
        return
    Recipe.from_dict(inputs.changed(get_recipe("modern").to_dict(), draw))


def path(place: Path, draw: random.Random) -> None:
    """Anything in place of a path."""
    given: Any = inputs.path(draw)
    reader = draw.choice((as_path, load_record, lr.load, lr.open_data))
    reader(given)


WRITERS: dict[str, Callable[[Path], object]] = {
    "held.lock": lambda path: locked(path.parent).__enter__(),
    "recipe.json": lambda path: RunDirectory(path.parent).begin(get_recipe("modern")),
    "record.json": lambda path: inputs.record().save(path),
    "step-00000001.json": lambda path: RunDirectory(path.parent).save(inputs.checkpoint(), 1),
    "step-00000001.safetensors": lambda path: RunDirectory(path.parent).save(inputs.checkpoint(), 1),
    "answers.bits": lambda path: Frontier(path.parent, {}, 8).add_answers(b"1"),
    "model.safetensors": lambda path: lr.save_pretrained(inputs.trained(), path.parent),
    "config.json": lambda path: lr.save_pretrained(inputs.trained(), path.parent),
    "README.md": lambda path: lr.save_pretrained(inputs.trained(), path.parent),
    "net.safetensors": lambda path: lr.export(inputs.trained(), path, overwrite=True),
    "report.html": lambda path: write_atomically(path, b"page"),
}
"""A file of each kind that is written, and what writes it."""
READERS: dict[str, Callable[[Path], object]] = {
    "a.png": lambda path: lr.predict(inputs.trained(), path),
    "b.png": lambda path: fingerprint_of_files(path.parent, [path]),
    "a.csv": lr.open_data,
    "names.txt": read_class_names,
    "options.toml": read_config,
    "record.json": load_record,
    "report.json": lambda path: read_records([path.parent]),
    "shapes.json": lr.load_shapes,
    "step-00000001.json": lr.load,
    "net.safetensors": lr.load,
    "net.onnx": lr.load,
    "net.pt2": lambda path: lr.load(path, trusted=True),
    "net.ts": lambda path: lr.load(path, trusted=True),
    "train-00000-of-00001.parquet": lambda path: lr.open_data(path.parent),
    "data_batch_1.bin": lambda path: lr.open_data(path.parent),
    "cifar-10-binary.tar.gz": lambda path: lr.open_data(path.parent),
    "plans.json": lambda path: JsonCache(path, key="plans", valid=bool),
}
"""A file of each kind that is read, and what reads it."""


def links(place: Path, draw: random.Random) -> None:
    """Links to a file of the user's in a folder from somebody else, under every name that is written there."""
    victim, run = place / "victim", place / "run"
    victim.write_text("mine")
    run.mkdir()
    name = draw.choice(list(WRITERS))
    for planted in sorted({*draw.sample(list(WRITERS), draw.randrange(9)), name}):
        draw.choice((os.symlink, os.link))(victim, run / planted)
    (place / "part").symlink_to(run)
    try:
        WRITERS[name]((run if draw.random() < 0.9 else below(place, place / "part")) / name)
    finally:
        if victim.read_text() != "mine":
            raise Accepted


def devices(place: Path, draw: random.Random) -> None:
    """A pipe, a socket or a device where a file is read or written, itself or behind a link: it stays as it is."""
    name, use = draw.choice([*WRITERS.items(), *READERS.items()])
    thing = inputs.special(place / name, draw)
    before = thing.lstat()
    try:
        use(place / name)
    finally:
        there = [path for path in place.iterdir() if os.path.samestat(path.lstat(), before)]
        if not there:  # a run may rename it, to X.damaged
            raise Accepted


TARGETS: dict[str, Callable[[Path, random.Random], None]] = {
    target.__name__: target
    for target in (
        record, report, checkpoint, resumed, times, network_file, onnx_file, program, shards, folder,
        source, scheme, model, counted, recipe, path, links, devices,
    )
}  # fmt: skip
"""Every reader by its name."""
assert os.name == "posix", "limits of memory are set by the resource module"
