"""Read timings of networks, by `lowrank time` and by our own benchmarks, from untrusted records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lowrank_cnn.deploy.timing import LayerTime
from lowrank_cnn.method.counting import Count, count
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.report.fields import first, items, mapping, number, sizes, text, whole
from lowrank_cnn.report.records import CPU, GPU, NetworkId, TimedNetwork
from lowrank_cnn.report.training_record import read_network
from lowrank_cnn.system.errors import LowRankError

_GPU_WORDS = ("cuda", "gpu", "nvidia", "mps", "amd instinct")


def read_timing(values: Mapping[str, Any], path: Path) -> Iterator[TimedNetwork]:
    """A timing, and that of its twin. If the input has four numbers, the MACs are those of a whole batch."""
    size = sizes(first(values, "input", "size", "image"))
    batch = whole(first(values, "batch", "batch_size")) or (size[0] if len(size) == 4 else 1)
    images = batch if len(size) == 4 else 1
    layers = tuple(layer for row in items(values.get("layers")) if (layer := _layer(row, images)))
    ms = _milliseconds(values) or _milliseconds(mapping(values.get("total"))) or sum(layer.ms for layer in layers)
    if not ms:
        raise LowRankError("it is a timing without any time.")
    macs, twin = whole(values.get("macs")), mapping(values.get("twin"))
    built = _converted(read_network(first(values, "model", "config", "name"), size[-3:]), values, twin)
    per_image = macs // images if macs else sum(layer.macs for layer in layers) or None
    yield TimedNetwork(
        path=str(path),
        network=built,
        device=device_class(text(values.get("device")) or ""),
        runtime=text(values.get("runtime")) or "torch",
        batch=batch,
        ms=ms,
        macs=per_image,
        params=whole(values.get("params")),
        layers=layers,
        dense=_dense_timed(built, per_image, twin, images),
        environment=mapping(values.get("environment")),
    )
    if twin:
        yield from read_timing({**twin, "twin": None, "environment": values.get("environment")}, path)


def _converted(built: NetworkId, values: Mapping[str, Any], twin: Mapping[str, Any]) -> NetworkId:
    """Call a network converted if its twin has the same name but another cost."""
    if first(twin, "model", "config", "name") != built.name or twin.get("macs") == values.get("macs"):
        return built
    return replace(built, name=f"{built.name}, converted", base=built.name)


def _dense_timed(
    built: NetworkId, macs: int | None, twin: Mapping[str, Any], images: int
) -> dict[str, int] | None:
    """The cost of the twin that a converted network was timed beside; of another that is not ours, its own."""
    if built.ours:
        return None
    cost = (whole(twin.get("macs")) or 0) // images if built.base else macs
    return {"macs": cost} if cost else None if built.base else {}


def read_timings(values: Mapping[str, Any], path: Path) -> Iterator[TimedNetwork]:
    """Several timings made in one environment."""
    for timing in items(values.get("timings")):
        yield from read_timing({"environment": values.get("environment"), **mapping(timing)}, path)


def read_gpu_speed(values: Mapping[str, Any], path: Path) -> Iterator[TimedNetwork]:
    """The inference times of `benchmarks.gpu_speed`, whose keys read network|mode|batch|way."""
    for run in map(mapping, items(values.get("runs"))):
        for key, measured in mapping(run.get("ways")).items():
            network, mode, batch, way, *_ = [*key.split("|"), "", "", ""]
            ms = number(mapping(measured).get("ms"))
            if mode == "inference" and ms and batch.isdecimal():
                yield _benchmarked(network, GPU, way, int(batch), ms, run, path)


def read_gpu_models(values: Mapping[str, Any], path: Path) -> Iterator[TimedNetwork]:
    """The inference times of `benchmarks.gpu_models`: a network dense, low-rank and thin, by several ways."""
    for run in map(mapping, items(values.get("runs"))):
        for row in map(mapping, items(run.get("rows"))):
            model, _, scheme = (text(row.get("row")) or "").rpartition(":")[2].partition("/")
            macs = {kind: whole(cost) for kind, cost in mapping(row.get("macs")).items()}
            names = {"dense": model, "low-rank": f"{model}, {scheme}"}
            names |= {kind: f"{model}, {kind} as {scheme}" for kind in macs if kind.startswith("thin")}
            for mode, batch in (("inference", 256), ("batch1", 1)):
                for way, measured in mapping(mapping(row.get(mode)).get("ms")).items():
                    kind, _, runtime = way.partition(", ")
                    ms = number(mapping(measured).get("ms"))
                    if not ms or kind not in names:
                        continue
                    network = NetworkId(names[kind], image=(3, 224, 224), base=None if kind == "dense" else model)
                    dense = {"macs": cost} if (cost := macs.get("dense")) else None
                    timing = TimedNetwork(str(path), network, GPU, runtime, batch, ms, macs.get(kind), None, ())
                    yield replace(timing, dense=dense, environment=mapping(run.get("environment")))


def read_cpu_speed(values: Mapping[str, Any], path: Path) -> Iterator[TimedNetwork]:
    """The times of `benchmarks.cpu_speed`: networks and their dense twins by batch, each at its fastest."""
    for run in map(mapping, items(values.get("batches"))):
        batch = whole(run.get("batch"))
        for row in map(mapping, items(run.get("rows"))):
            for name, way, time in (("network", "best_way", "best_ms"), ("twin", "twin_way", "twin_best_ms")):
                ms, network = number(mapping(row.get(time)).get("ms")), text(row.get(name))
                if batch and ms and network:
                    yield _benchmarked(network, CPU, text(row.get(way)) or "", batch, ms, values, path)


def _benchmarked(
    name: str, device: str, runtime: str, batch: int, ms: float, made: Mapping[str, Any], path: Path
) -> TimedNetwork:
    """A whole network of ours, timed on images of its own size."""
    network = read_network({"name": name}, _own_image(name))
    environment = mapping(made.get("environment"))
    cost = _own_cost(name)
    macs, params = (cost.macs, cost.params) if cost else (None, None)
    return TimedNetwork(str(path), network, device, runtime, batch, ms, macs, params, (), environment=environment)


def device_class(device: str) -> str:
    """CPU or GPU, from any name of a device."""
    return GPU if any(word in device.lower() for word in _GPU_WORDS) else CPU


def _layer(row: object, images: int) -> LayerTime | None:
    """A layer that multiplies and was timed; pools and activations have nothing to compare."""
    values = mapping(row)
    name, macs, ms = text(first(values, "name", "layer")), whole(values.get("macs")), _milliseconds(values)
    kind = text(values.get("type")) or ""
    return LayerTime(name, kind, macs // images, ms) if name and macs and ms else None


def _milliseconds(values: Mapping[str, Any]) -> float | None:
    seconds = number(first(values, "seconds", "median_seconds"))
    ms = number(first(values, "ms", "median_ms", "total_ms", "milliseconds"))
    return 1000 * seconds if ms is None and seconds is not None else ms


@cache
def _own_cost(name: str) -> Count | None:
    if name not in list_models():
        return None
    with torch.device("meta"):
        return count(create_model(name), _own_image(name))


def _own_image(name: str) -> tuple[int, ...]:
    """The size of image that a network of ours is made for."""
    if name not in list_models():
        return ()
    with torch.device("meta"):
        return tuple(create_model(name).input_size)
