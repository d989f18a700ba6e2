"""Find record files in folders and read them, whatever they hold.

A record is a JSON object with a `kind`. `READERS` maps a kind to the function that reads it; a new kind is one new
entry. A reader leaves out what is missing or impossible. If a record lacks what its reader cannot do without, the
reader raises a `LowRankError`, and the page lists the file as skipped.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from lowrank_cnn.choose.frontier import KIND
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import BrokenSealError, UnreadableError, is_sealed, read_json, unsealed
from lowrank_cnn.deploy.timing import LayerTime
from lowrank_cnn.models import family_of, list_models
from lowrank_cnn.models.build import count_by_name
from lowrank_cnn.models.hub import CONFIG, WEIGHTS
from lowrank_cnn.report.records import (
    CPU,
    GPU,
    NetworkId,
    Records,
    Run,
    SkippedFile,
    TimedNetwork,
    data_identity,
    data_name,
    first,
    items,
    mapping,
    number,
    read_details,
    share,
    sizes,
    text,
    whole,
)
from lowrank_cnn.train.evaluate import TOP_FIVE
from lowrank_cnn.train.run_folder import Epoch

_NO_SETTING = ("name", "evaluate_every")
"""Fields of a recipe that teach nothing."""


def read_training(values: Mapping[str, Any], path: Path) -> Iterator[Run]:
    """The run of a record; a record without a checksum gives an unsealed run."""
    data, result = (mapping(values.get(name)) for name in ("data", "result"))
    config = _config(mapping(values.get("model")))
    history = tuple(_epoch(row) for row in items(values.get("history")) if isinstance(row, Mapping))
    latest = next((row.accuracy for row in reversed(history) if row.accuracy is not None), None)
    top1, recipe = share(result.get("top1")), mapping(values.get("recipe"))
    built = read_network(values.get("model"), _image_size(config, recipe, data))
    yield Run(
        path=str(path),
        network=built,
        data=data_name(data),
        images=data_identity(data),
        recipe=text(recipe.get("name")) or "custom",
        seed=whole(values.get("seed")),
        status=text(values.get("status")) or "unknown",
        watched=text(values.get("watched")) or "test",
        top1=latest if top1 is None else top1,
        top5=_top5(result, data),
        macs=whole(result.get("macs")),
        params=whole(result.get("params")),
        seconds=number(result.get("seconds")),
        history=history,
        settings=settings_of(recipe, config, data, begun_from=text(values.get("begun_from"))),
        n=whole(result.get("n")) or whole(data.get("test")),
        dense=_dense(result, built),
        config=config,
        environment=mapping(values.get("environment")),
        details=read_details(mapping(result.get("details"))),
        sealed=is_sealed(values),
    )


def _top5(result: Mapping[str, Any], data: Mapping[str, Any]) -> float | None:
    """Nothing where every answer is among the first five: known to be so, by the names of the classes."""
    classes = len(items(data.get("classes")))
    return None if 0 < classes <= TOP_FIVE else share(result.get("top5"))


def _dense(result: Mapping[str, Any], built: NetworkId) -> dict[str, int] | None:
    """What the record says of the unconverted network; one that never speaks of it was not converted."""
    if (built.base or built.name) in list_models():  # by its name, all is known
        return None
    told = "dense" in result or built.base is not None
    cost = mapping(result.get("dense") if told else result)
    found = {name: value for name in ("macs", "params") if (value := whole(cost.get(name)))}
    return None if told and not found else found


def _image_size(config: Mapping[str, Any], recipe: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[int, ...]:
    """The images as the network got them, and as its cost was counted: cropped, where the recipe crops."""
    image = sizes(first(data, "size", "image"))
    side = whole(config.get("image_size")) or whole(recipe.get("crop"))
    return (image[0], side, side) if side and len(image) == 3 else image


def _epoch(row: Mapping[str, Any]) -> Epoch:
    return Epoch(
        epoch=whole(row.get("epoch")) or 0,
        lr=number(row.get("lr")),
        train_loss=number(row.get("train_loss")),
        train_accuracy=share(row.get("train_accuracy")),
        accuracy=share(row.get("accuracy")),
        seconds=number(row.get("seconds")),
        images_per_second=number(row.get("images_per_second")),
    )


def settings_of(
    recipe: Mapping[str, Any], config: Mapping[str, Any], data: Mapping[str, Any], begun_from: str | None = None
) -> tuple[tuple[str, str], ...]:
    """The recipe, and what else networks that are compared must have alike."""
    built = {"norm": config.get("norm"), "pool": config.get("pool"), "init": config.get("init") or "composite"}
    fields = {**recipe, **built}
    fields |= {"images": data.get("train")} if data.get("train") else {}
    fields |= {"begun_from": begun_from} if begun_from else {}
    return tuple(
        sorted((str(key)[:40], str(value)[:40]) for key, value in fields.items() if key not in _NO_SETTING)
    )


def read_network(model: object, image: object) -> NetworkId:
    """The network, given by its name alone or with its options."""
    told = {"name": model} if isinstance(model, str) else mapping(model)
    name, values = text(told.get("name")), _config(told)
    if name is None:
        raise LowRankError("it names no network.")
    base = text(values.get("name")) or text(first(told, "base", "class")) if "conversion" in told else None
    scheme, stride = text(values.get("scheme")), whole(values.get("stride"))
    return NetworkId(
        name,
        scheme=None if scheme == "dense" else scheme,
        width=number(values.get("width")) or 1.0,
        norm=text(values.get("norm")),
        stride=None if stride == _own_stride(base or name) else stride,
        image=sizes(image),
        base=base,
    )


def _config(model: dict[str, Any]) -> dict[str, Any]:
    """The options that a network was built with; those of a converted one stand apart from its new name."""
    return mapping(model.get("config")) if "conversion" in model else model


def _own_stride(name: str) -> int:
    """The stride of the first conv that a network has by itself."""
    return family_of(name).VARIANTS[name].stride if name in list_models() else 1


_GPU_WORDS = ("cuda", "gpu", "nvidia", "mps", "amd instinct")


def read_timing(values: Mapping[str, Any], path: Path) -> Iterator[TimedNetwork]:
    """A timing, and that of its twin. If the input has four numbers, the MACs are those of a whole batch.

    `lowrank demo` adds the options of the network as `model`.
    """
    size = sizes(values.get("input"))
    batch = size[0] if len(size) == 4 else 1
    layers = tuple(layer for row in items(values.get("layers")) if (layer := _layer(row, batch)))
    ms = number(mapping(values.get("total")).get("ms"))
    if not ms:
        raise LowRankError("it is a timing without any time.")
    macs, twin = (whole(values.get("macs")) or 0) // batch or None, mapping(values.get("twin"))
    built = _converted(read_network(first(values, "model", "name"), size[-3:]), values, twin)
    yield TimedNetwork(
        path=str(path),
        network=built,
        device=device_class(text(values.get("device")) or ""),
        runtime=text(values.get("runtime")) or "torch",
        batch=batch,
        ms=ms,
        macs=macs,
        params=None,
        layers=layers,
        dense=_dense_timed(built, macs, twin, batch),
        environment=mapping(values.get("environment")),
    )
    if twin:
        yield from read_timing({**twin, "twin": None, "environment": values.get("environment")}, path)


def _converted(built: NetworkId, values: Mapping[str, Any], twin: Mapping[str, Any]) -> NetworkId:
    """Call a network converted if its twin has the same name but another cost."""
    if twin.get("name") != built.name or twin.get("macs") == values.get("macs"):
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
    cost = _own_cost(name) if name in list_models() else None
    network = read_network(name, cost.input if cost else ())
    macs, params = (cost.macs, cost.params) if cost else (None, None)
    environment = mapping(made.get("environment"))
    return TimedNetwork(str(path), network, device, runtime, batch, ms, macs, params, (), environment=environment)


_own_cost = cache(count_by_name)


def device_class(device: str) -> str:
    """CPU or GPU, from any name of a device."""
    return GPU if any(word in device.lower() for word in _GPU_WORDS) else CPU


def _layer(row: object, images: int) -> LayerTime | None:
    """A layer that multiplies and was timed; pools and activations have nothing to compare."""
    values = mapping(row)
    name, macs, ms = text(values.get("name")), whole(values.get("macs")), number(values.get("ms"))
    return LayerTime(name, text(values.get("type")) or "", macs // images, ms) if name and macs and ms else None


FIRST_STEP = "lowrank train nin-c3-lr --data digits --recipe digits --width 0.25 --out runs/first"
_TIMING_FIELDS = {"runtime", "device", "layers", "total"}


def read_records(paths: Iterable[str | Path]) -> Records:
    """Every record in these files and folders; what cannot be read is listed, not raised."""
    records, seen = Records(), set()
    for path in map(Path, paths):
        if not path.exists():
            raise LowRankError(f"there is no file or folder {path}; make a run first: {FIRST_STEP}")
        for file in _files(path):
            if (resolved := file.resolve()) not in seen:
                seen.add(resolved)
                _read_into(records, file)
    return records


_BESIDE = ("recipe.json", "shape_costs.json", "shapes.json")
"""Files of a run beside its record."""


def require_records(paths: Iterable[str | Path], records: Records) -> None:
    """Refuse to go on with nothing, and say what to run first."""
    if records:
        return
    places = " or ".join(map(str, paths)) or "the folders given"
    if records.elsewhere:
        raise LowRankError(
            f"{places} has no training run and no timing of a network; {shown_elsewhere(records)[0]}."
        )
    rest = f" (skipped: {records.skipped[0].path}, {records.skipped[0].reason})" if records.skipped else ""
    raise LowRankError(f"there is no record in {places}{rest}; make one first: {FIRST_STEP}")


def shown_elsewhere(records: Records) -> list[str]:
    """A sentence for each file that another command shows."""
    return [f"{file.path} is shown by {file.reason}" for file in records.elsewhere]


def _files(path: Path) -> Iterator[Path]:
    """The JSON files of a folder, at any depth, less those of a run or a stored network that are no record."""
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*.json")):
        of_checkpoint = file.with_suffix(".safetensors").exists()
        of_run = file.name in _BESIDE and (file.parent / "record.json").exists()
        # What `reproduce` keeps of a finished run.
        of_network = file.name == CONFIG and (file.parent / WEIGHTS).exists()
        if file.is_file() and not (of_checkpoint or of_run or of_network):
            yield file


def _read_into(records: Records, file: Path) -> None:
    """Add the records of a file, which holds one or an array of them."""
    try:
        values = _load(file)
    except LowRankError as error:
        records.skipped.append(SkippedFile(str(file), str(error)))
        return
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, Mapping) and value.get("kind") == KIND:
            family = text(value.get("family")) or "FAMILY"
            command = shlex.join(["lowrank", "frontier", family, "--out", str(file.parent)])
            records.elsewhere.append(SkippedFile(str(file), f"`{command}`"))
            continue
        try:
            for record in read_record(value, file):
                records.add(record)
        except LowRankError as error:
            records.skipped.append(SkippedFile(str(file), str(error)))


def _load(file: Path) -> object:
    """The value in a file; a checksum that it has must fit."""
    try:
        value = read_json(file)
        if isinstance(value, dict):
            unsealed(value)
    except (UnreadableError, BrokenSealError) as error:
        raise LowRankError(f"{error}.") from error
    return value


def read_record(values: object, path: Path) -> list[Run | TimedNetwork]:
    """Read one record, by its kind. A timing may include that of its dense twin."""
    if not isinstance(values, Mapping):
        raise LowRankError("it is not a record but plain JSON.")
    kind = text(values.get("kind")) or _kind_by_fields(values)
    if kind is None:
        raise LowRankError(f"it has no kind ({', '.join(READERS)}).")
    if kind not in READERS:
        raise LowRankError(f"a record of kind {kind!r} has no training run and no timing of a network.")
    return list(READERS[kind](values, path))


def _kind_by_fields(values: Mapping[str, Any]) -> str | None:
    """What `lowrank time --json` prints (timings in one environment), and benchmarks that name no kind."""
    if values.keys() >= _TIMING_FIELDS:
        return "timing"
    if items(values.get("batches")):
        return "cpu-speed"
    return "timings" if items(values.get("timings")) else None


def _nothing(_values: Mapping[str, Any], _path: Path) -> Iterator[Run]:
    """A table that was made of runs, whose own records say more."""
    yield from ()


Reader = Callable[[Mapping[str, Any], Path], Iterator[Run | TimedNetwork]]
READERS: dict[str, Reader] = {
    "training": read_training,
    "timing": read_timing,
    "timings": read_timings,
    "gpu-speed": read_gpu_speed,
    "gpu-models": read_gpu_models,
    "cpu-speed": read_cpu_speed,
    "reproduction": _nothing,
    "search": _nothing,
}
