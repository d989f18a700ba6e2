"""Records: find them in files and folders, check them, and read them as training runs and timings.

A record is a JSON object with a `kind`. Anybody may have edited it: a record that does not fit is skipped with one
sentence, by `read_records` alone.
"""

from __future__ import annotations

import math
import re
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.choose.frontier import KIND
from lowrank_cnn.core.errors import LowRankError, check_number, check_type
from lowrank_cnn.core.files import read_json, unsealed
from lowrank_cnn.core.text import printable
from lowrank_cnn.data.small_sets import CLASSES as CIFAR10_CLASSES
from lowrank_cnn.deploy.timing import LayerTime
from lowrank_cnn.models import family_of, list_models
from lowrank_cnn.models.hub import CONFIG, WEIGHTS
from lowrank_cnn.train.evaluate import TOP_FIVE, EvaluationDetails, WrongImage
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.run_folder import Epoch

CPU, GPU = "CPU", "GPU"
LONGEST_TEXT = 200
LARGEST_THUMBNAIL = 20_000
MOST_WORST = 20


@dataclass(frozen=True)
class NetworkId:
    """The network of a record: its name, and the options that change its cost.

    `base` is the name of the network that it was converted or made thinner from; `thin` says whether it has fewer
    filters than that network, all of them dense.
    """

    name: str
    scheme: str | None = None
    width: float = 1.0
    norm: str | None = None
    stride: int | None = None
    image: tuple[int, ...] = ()
    base: str | None = None
    thin: bool = False

    @cached_property
    def ours(self) -> bool:
        """Whether the name identifies the network; others are named after their class, which many share."""
        return self.name in list_models()

    @property
    def label(self) -> str:
        width = f"width {self.width:.4g}" if self.width != 1 else None
        stride = f"stride {self.stride}" if self.stride else None
        thinned = re.search(r"\+thin\(([0-9.]+)\)", self.name)
        name = self.name.replace(thinned[0], "") if thinned else self.name
        told = " ".join(filter(None, [name, self.scheme, width, stride]))
        return f"{told} thin, {thinned[1]} of the MACs" if thinned else told


@dataclass(frozen=True)
class AnswerDetails:
    """The field `result["details"]` of a record, as counts that can be added up over runs.

    `per_class` [classes, 2] has the images and the right answers of each class. `confusion` [true class, predicted
    class] counts images; it is empty where the record has no matrix. `bins` [bins, 3] has the images, the sum of
    their confidences and the right answers, by rising confidence. `pairs` are true class, predicted class, images.
    """

    classes: tuple[str, ...]
    per_class: Tensor
    confusion: Tensor
    bins: Tensor
    pairs: tuple[tuple[str, str, int], ...] = ()
    worst: tuple[WrongImage, ...] = ()

    @property
    def calibration_error(self) -> float | None:
        """The distance of confidence from accuracy, averaged over images; None without any."""
        images, confidence, right = self.bins.T
        return float((confidence - right).abs().sum() / images.sum()) if images.any() else None


@dataclass(frozen=True)
class Run:
    """A training run: what was trained on what, and the result so far.

    `images` identifies the images: the digest of the data where the record has one. `settings` are the fields of
    the recipe, and the norm and the initialisation of the network. `n` is the number of test images. `dense` is
    the cost of the dense network that it stands for; None if unknown.
    """

    path: str
    network: NetworkId
    data: str
    images: str
    recipe: str
    seed: int | None
    status: str
    watched: str
    top1: float | None
    top5: float | None
    macs: int | None
    params: int | None
    seconds: float | None
    history: tuple[Epoch, ...]
    settings: tuple[tuple[str, str], ...] = ()
    n: int | None = None
    dense: Mapping[str, int] | None = field(hash=False, default=None)
    environment: Mapping[str, Any] = field(hash=False, default_factory=dict)
    details: AnswerDetails | None = field(compare=False, default=None)

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def overfit(self) -> float | None:
        """Accuracy on the augmented training images of the last epoch, minus accuracy on the test images."""
        trained = self.history[-1].train_accuracy if self.history else None
        return None if trained is None or self.top1 is None else trained - self.top1


@dataclass(frozen=True)
class TimedNetwork:
    """How long a network takes for a batch on one kind of device, and how long each of its layers takes."""

    path: str
    network: NetworkId
    device: str
    runtime: str
    batch: int
    ms: float
    macs: int | None
    params: int | None = None
    layers: tuple[LayerTime, ...] = ()
    dense: Mapping[str, int] | None = field(hash=False, default=None)
    environment: Mapping[str, Any] = field(hash=False, default_factory=dict)
    convs: str = ""
    """Whether torch's convs or our kernels ran; empty where the record does not say it."""

    @property
    def ms_per_image(self) -> float:
        return self.ms / self.batch

    @property
    def hardware(self) -> str:
        return str(self.environment.get(self.device.lower()) or self.device)


@dataclass(frozen=True)
class SkippedFile:
    path: str
    reason: str


@dataclass
class Records:
    """The result of `read_records`: training runs, timings, and skipped files, each with the reason."""

    runs: list[Run] = field(default_factory=list)
    timings: list[TimedNetwork] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.runs or self.timings)


class Fields:
    """A JSON object of a record. A missing field is None or empty; one of the wrong kind raises `LowRankError`."""

    def __init__(self, values: Any, name: str = "a record") -> None:
        check_type(name, values, dict)
        self.values: dict[str, Any] = values

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def object(self, name: str) -> Fields:
        return Fields({} if self.values.get(name) is None else self.values[name], name)

    def list(self, name: str) -> Sequence[Any]:
        value = self.values.get(name)
        check_type(name, value, list, type(None))
        return value or []

    def objects(self, name: str) -> Sequence[Fields]:
        return [Fields(value, name) for value in self.list(name)]

    def text(self, name: str) -> str | None:
        """Text, or a number that names something; cut if it is absurdly long."""
        value = self.values.get(name)
        check_type(name, value, str, int, float, type(None))
        return None if value is None else printable(str(value).strip()[:LONGEST_TEXT]) or None

    def number(self, name: str, *, least: float = 0.0, most: float = 1e18) -> float | None:
        """A number within these limits; None for NaN and infinity, as in the record of a run that diverged."""
        value = self.values.get(name)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        check_number(name, value, least=least, most=most)
        return float(value)

    def share(self, name: str) -> float | None:
        return self.number(name, most=1.0)

    def whole(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else int(value)

    def sizes(self, name: str) -> tuple[int, ...]:
        for side in self.list(name):
            check_number(name, side, least=1, most=1e9, whole=True)
        return tuple(self.list(name))

    def environment(self) -> dict[str, Any]:
        """Versions and hardware by name: plain values alone."""
        return {
            printable(name): printable(value) if isinstance(value, str) else value
            for name, value in self.object("environment").values.items()
            if isinstance(value, str | int | float | None)
        }


def read_training(values: Fields, path: str) -> Run:
    model, recipe, data, result = map(values.object, ("model", "recipe", "data", "result"))
    config = model.object("config") if "conversion" in model else model
    history = tuple(map(_epoch, values.objects("history")))
    latest = next((row.accuracy for row in reversed(history) if row.accuracy is not None), None)
    top1 = result.share("top1")
    return Run(
        path=path,
        network=read_network(model, _image_size(config, recipe, data)),
        data=data_name(data),
        images=_data_identity(data),
        recipe=recipe.text("name") or "custom",
        seed=values.whole("seed"),
        status=values.text("status") or "unknown",
        watched=values.text("watched") or "test",
        top1=latest if top1 is None else top1,
        # Of five classes, every answer is among the first five.
        top5=None if 0 < len(data.list("classes")) <= TOP_FIVE else result.share("top5"),
        macs=result.whole("macs"),
        params=result.whole("params"),
        seconds=result.number("seconds"),
        history=history,
        settings=settings_of(recipe.values, config.values, data.whole("train"), values.text("begun_from")),
        n=result.whole("n") or data.whole("test"),
        dense={name: cost for name in ("macs", "params") if (cost := result.object("dense").whole(name))} or None,
        environment=values.environment(),
        details=read_details(result.object("details").values),
    )


def _epoch(row: Fields) -> Epoch:
    numbers = {name: row.number(name) for name in ("lr", "seconds", "images_per_second")}
    shares = {name: row.share(name) for name in ("train_accuracy", "accuracy")}
    return Epoch(row.whole("epoch") or 0, train_loss=row.number("train_loss", least=-1e18), **shares, **numbers)


def _image_size(config: Fields, recipe: Fields, data: Fields) -> tuple[int, ...]:
    """The images as the network got them, and as its cost was counted: cropped, where the recipe crops."""
    image = data.sizes("image")
    side = config.whole("image_size") or recipe.whole("crop")
    return (image[0], side, side) if side and len(image) == 3 else image


def settings_of(
    recipe: Mapping[str, Any], config: Mapping[str, Any], images: int | None = None, begun_from: str | None = None
) -> tuple[tuple[str, str], ...]:
    """The recipe, its missing fields by default, and what else networks that are compared must have alike."""
    fields = {**Recipe().to_dict(), **recipe, "norm": config.get("norm"), "pool": config.get("pool")}
    fields |= {"init": config.get("init") or "composite"}
    fields |= {"images": images} if images else {}
    fields |= {"begun_from": begun_from} if begun_from else {}
    for name in ("name", "evaluate_every"):  # they teach nothing
        fields.pop(name, None)
    return tuple(sorted((printable(str(key)[:40]), printable(str(fields[key])[:40])) for key in fields))


def read_details(values: Mapping[str, Any]) -> AnswerDetails | None:
    """The details of a run's answers; None if the record has none."""
    told = Fields(values, "details")
    rows = told.objects("per_class")
    if not rows:
        return None
    pairs = ((row.text("true"), row.text("predicted"), row.whole("n")) for row in told.objects("most_confused"))
    return AnswerDetails(
        classes=tuple(row.text("class") or "unnamed" for row in rows),
        per_class=_counts(rows, "accuracy"),
        confusion=_matrix(told.list("confusion"), len(rows)),
        bins=_counts(told.object("calibration").objects("bins"), "confidence", "accuracy"),
        pairs=tuple((true, predicted, n) for true, predicted, n in pairs if true and predicted and n),
        worst=tuple(_wrong_image(row) for row in told.objects("worst")[:MOST_WORST]),
    )


def _counts(rows: Sequence[Fields], *shares: str) -> Tensor:
    """The number of images of each row, with the counts that its shares amount to."""
    found = [[row.whole("n") or 0, *(row.share(name) or 0.0 for name in shares)] for row in rows]
    table = torch.tensor(found, dtype=torch.float64).reshape(-1, 1 + len(shares))
    table[:, 1:] *= table[:, :1]
    return table


def _matrix(rows: Sequence[Any], classes: int) -> Tensor:
    try:
        found = torch.tensor(rows, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LowRankError("its confusion matrix is not made of rows of counts.") from error
    if rows and (found.shape != (classes, classes) or (found < 0).any()):
        raise LowRankError(f"its confusion matrix must have a count for each two of {classes} classes.")
    return found


def _wrong_image(row: Fields) -> WrongImage:
    image, true, predicted = (row.text(name) or "unnamed" for name in ("image", "true", "predicted"))
    known: dict[str, Any] = {"probability": row.share("probability"), "loss": row.number("loss")}
    given = str(row.values.get("thumbnail"))
    picture = re.fullmatch(r"data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/=]+", given)
    known["thumbnail"] = given if picture and len(given) <= LARGEST_THUMBNAIL else None
    return WrongImage(image, true, predicted, **known)


def pool_answers(details: Sequence[AnswerDetails]) -> AnswerDetails:
    """The answers of several runs together; those of other classes or bins than the first run's are left out."""

    def shape(one: AnswerDetails) -> tuple[object, ...]:
        return one.classes, one.confusion.shape, one.bins.shape

    first = details[0]
    alike = [one for one in details if shape(one) == shape(first)]
    per_class, confusion, bins = (
        torch.stack([getattr(one, name) for one in alike]).sum(0) for name in ("per_class", "confusion", "bins")
    )
    worst = sorted((image for one in alike for image in one.worst), key=lambda image: image.loss or 0.0)
    hardest = {image.image: image for image in worst}  # of an image that several runs got wrong, the largest loss
    worst = sorted(hardest.values(), key=lambda image: -(image.loss or 0.0))[:MOST_WORST]
    pairs = first.pairs
    if len(confusion):
        found = EvaluationDetails(first.classes, confusion, bins).most_confused(confusion.numel())
        pairs = tuple((pair["true"], pair["predicted"], pair["n"]) for pair in found)
    return AnswerDetails(first.classes, per_class, confusion, bins, pairs, tuple(worst))


def read_network(model: Fields, image: tuple[int, ...]) -> NetworkId:
    """The network, from its name and options; those of a converted one stand apart from its new name."""
    converted = "conversion" in model
    name, options = model.text("name"), model.object("config") if converted else model
    if name is None:
        raise LowRankError("it names no network.")
    base = options.text("name") or model.text("base") if converted else None
    scheme, stride = options.text("scheme"), options.whole("stride")
    own_stride = family_of(own).VARIANTS[own].stride if (own := base or name) in list_models() else 1
    return NetworkId(
        name,
        scheme=None if scheme == "dense" else scheme,
        width=options.number("width") or 1.0,
        norm=options.text("norm"),
        stride=None if stride == own_stride else stride,
        image=image,
        base=base,
        thin="thinning" in model and not model.object("conversion").list("changed"),
    )


def read_timing(values: Fields, path: str) -> list[TimedNetwork]:
    """A timing, and that of its twin. If the input has four numbers, the MACs are those of a whole batch."""
    size, ms = values.sizes("input"), values.object("total").number("ms")
    batch = size[0] if len(size) == 4 else 1
    if not ms:
        raise LowRankError("it is a timing without any time.")
    macs, twin = (values.whole("macs") or 0) // batch or None, values.object("twin")
    model = values.object("model") if values.values.get("model") else Fields({"name": values.text("name")})
    built = read_network(model, size[-3:])
    if twin.text("name") == built.name and twin.whole("macs") != values.whole("macs"):
        # Its twin has the same name, but another cost: it is the converted form of the twin.
        built = replace(built, name=f"{built.name}, converted", base=built.name)
    cost = (twin.whole("macs") or 0) // batch if built.base else macs
    dense = {"macs": cost} if cost else None if built.base else {}
    timed = TimedNetwork(
        path=path,
        network=built,
        device=GPU if (values.text("device") or "").startswith(("cuda", "mps")) else CPU,
        runtime=values.text("runtime") or "torch",
        batch=batch,
        ms=ms,
        macs=macs,
        layers=tuple(filter(None, (_layer(row, batch) for row in values.objects("layers")))),
        dense=None if built.ours else dense,
        environment=values.environment(),
        convs=values.text("convs") or "",
    )
    if not twin.values:
        return [timed]
    own = {"twin": None, "environment": values.environment()}
    return [timed, *read_timing(Fields({**twin.values, **own}), path)]


def _layer(row: Fields, images: int) -> LayerTime | None:
    """A layer that multiplies and was timed; pools and activations have nothing to compare."""
    name, macs, ms = row.text("name"), row.whole("macs"), row.number("ms")
    return LayerTime(name, row.text("type") or "", macs // images, ms) if name and macs and ms else None


FIRST_STEP = "lowrank train nin-c3-lr --data digits --recipe digits --width 0.25 --out runs/first"


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


def _files(path: Path) -> Iterator[Path]:
    """The JSON files of a folder, at any depth, less those of a run or a stored network that are no record."""
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*.json")):
        of_checkpoint = file.with_suffix(".safetensors").exists()
        beside = file.name in ("recipe.json", "shape_costs.json", "shapes.json")
        of_run = beside and (file.parent / "record.json").exists()
        # `reproduce` keeps a network beside the record of a finished run.
        of_network = file.name == CONFIG and (file.parent / WEIGHTS).exists()
        if file.is_file() and not (of_checkpoint or of_run or of_network):
            yield file


def _read_into(records: Records, file: Path) -> None:
    """Add the records of a file, which holds one or an array of them. Records that do not fit are skipped here."""

    def skip(error: Exception) -> None:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).rstrip(".")
        records.skipped.append(SkippedFile(str(file), f"{reason}."))

    try:
        values = read_json(file)
    except LowRankError as error:
        skip(error)
        return
    for value in values if isinstance(values, list) else [values]:
        try:
            _read_value(records, value, file)
        except (LowRankError, RecursionError) as error:
            skip(error)


def _read_value(records: Records, value: object, file: Path) -> None:
    fields = Fields(value)
    unsealed(fields.values)  # refuses a checksum that does not fit
    kind = fields.text("kind") or ("timings" if fields.list("timings") else None)  # of `lowrank time --json`
    if kind == "training":
        records.runs.append(read_training(fields, str(file)))
    elif kind == "timing":
        records.timings += read_timing(fields, str(file))
    elif kind == "timings":
        found = fields.objects("timings")
        timings = [Fields({"environment": fields.environment(), **one.values}) for one in found]
        records.timings += [timed for one in timings for timed in read_timing(one, str(file))]
    elif kind == KIND:
        family = fields.text("family") or "FAMILY"
        command = shlex.join(["lowrank", "frontier", family, "--out", str(file.parent)])
        raise LowRankError(f"`{command}` shows it.")
    elif kind is None:
        raise LowRankError("it has no kind (training, timing, timings, reproduction).")
    elif kind != "reproduction":  # a table of runs that have records of their own
        raise LowRankError(f"a record of kind {kind!r} has no training run and no timing of a network.")


def require_records(paths: Iterable[str | Path], records: Records) -> None:
    """Refuse to go on with nothing, and say what to run first."""
    if records:
        return
    places = " or ".join(map(str, paths)) or "the folders given"
    rest = f" (skipped: {records.skipped[0].path}, {records.skipped[0].reason})" if records.skipped else ""
    raise LowRankError(f"there is no record in {places}{rest}; make one first: {FIRST_STEP}")


_NAMES = {"cifar10": "CIFAR-10", "ilsvrc12": "ILSVRC", "imagenet1k": "ILSVRC", "places205": "Places"}
_WHOLE = {"CIFAR-10": (50_000, 10_000), "ILSVRC": (1_281_167, 50_000), "Places": (2_448_873, 20_500)}
_NEARLY = 0.99
"""Of the images: a few may be damaged, and were left out."""


def data_label(name: str) -> str:
    """One name per data set, without its owner on the Hub."""
    return _NAMES.get(re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower()), name)


def data_name(data: Fields) -> str:
    """A data set is called by its folder, which may be any; CIFAR-10 is known by its classes and their images."""
    name, sizes = data.text("name") or "unnamed data", (data.whole("train"), data.whole("test"))
    if data.text("held_out_of"):
        return f"{name}, images held out"
    if tuple(data.list("classes")) == CIFAR10_CLASSES and sizes == _WHOLE["CIFAR-10"]:
        return "cifar10"
    full = _WHOLE.get(data_label(name))
    if full is None or all(size is None or size >= _NEARLY * n for size, n in zip(sizes, full, strict=True)):
        return name
    # Accuracies on a part cannot be compared with published ones.
    return f"a part of {data_label(name)} ({' + '.join(f'{size or 0:,}' for size in sizes)} images)"


def _data_identity(data: Fields) -> str:
    """An identity of the images that does not depend on their name: a digest, or classes and image counts."""
    classes = zlib.crc32(repr([str(name) for name in data.list("classes")]).encode())
    known = data.text("held_out_of") or data.text("digest")  # each seed of `compare` holds out others of a set
    return known or f"{classes} {data.whole('train')} {data.whole('test')}"
