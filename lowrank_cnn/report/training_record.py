"""Read the untrusted record of a training run; missing and impossible values are left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lowrank_cnn.models import family_of, list_models
from lowrank_cnn.report.datasets import data_identity, data_name
from lowrank_cnn.report.details import read_details
from lowrank_cnn.report.fields import first, items, mapping, number, share, sizes, text, whole
from lowrank_cnn.report.records import NetworkId, Run
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.seal import is_sealed
from lowrank_cnn.train.record import Epoch
from lowrank_cnn.train.score import TOP_FIVE

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
