"""The command `lowrank train`."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import lowrank_cnn as lr
from lowrank_cnn.cli import options as opt
from lowrank_cnn.cli.options import IMAGES, NETWORK, TRAINING, DataOptions, Json, grouped, option
from lowrank_cnn.cli.show import console, print_accuracy, print_json, print_problems
from lowrank_cnn.core.errors import LowRankError, MissingExtra, check_number, first_line, nearest
from lowrank_cnn.core.files import read_text
from lowrank_cnn.core.processes import first_process
from lowrank_cnn.core.text import counted, first_few, si

if TYPE_CHECKING:
    from torch import nn

    from lowrank_cnn.data import Data
    from lowrank_cnn.train import Recipe
    from lowrank_cnn.train.run_folder import Record
    from lowrank_cnn.train.trained import Trained

# The options of `lowrank train`, in groups. Rare settings have none: --set NAME=VALUE changes them.

RARE = {"stride": int, "channels": int, "hold_gb": float, "bad": str}
"""Settings of the network and of the images; all others are `RunSettings` or fields of the recipe."""


def is_setting(name: str) -> bool:
    """Whether --set changes a value of this name; recipes themselves are chosen by --recipe."""
    from lowrank_cnn.train.recipe import Recipe, RunSettings

    return name in {*RARE, *(field.name for kind in (Recipe, RunSettings) for field in fields(kind))} - {"name"}


@dataclass(frozen=True)
class NetworkOptions:
    """How the network is built."""

    scheme: opt.Scheme = None
    width: opt.Width = None
    pretrained: opt.Pretrained = None
    into: opt.Into = None
    thin: Annotated[float | None, option("Train a thinner network, of this share of MACs.", panel=NETWORK)] = None
    macs: Annotated[float | None, option("Share of the MACs that the scheme keeps: 0.4.", panel=NETWORK)] = None
    shapes: Annotated[Path | None, option("Learned shapes.json to train from scratch.", panel=NETWORK)] = None

    def training(self) -> tuple[str | None, Callable[..., Record]]:
        """The scheme that the network is built by, and the function that trains it."""
        from lowrank_cnn.method.budget import Budget

        Budget.of(macs=self.macs)  # refused before images are read
        if self.thin is not None and (self.scheme or self.shapes):
            raise LowRankError("--thin makes dense filters fewer: leave --scheme and --shapes out.")
        if self.shapes is not None and self.scheme is not None:
            raise LowRankError("give --scheme or --shapes, not both: learned shapes are a scheme for every layer.")
        if self.macs is not None and self.scheme is None:
            raise LowRankError("--macs is the share that a scheme keeps: add --scheme, or take --thin.")
        if self.scheme is not None and self.scheme.strip().startswith("learned"):
            shapes = lr.parse_scheme(self.scheme)
            if self.macs is None:
                raise LowRankError("learned shapes need a budget: give --macs, like --macs 0.4.")
            return None, partial(_learn, shapes=shapes, macs=self.macs)
        if self.shapes is None:
            return self.scheme, lr.fit
        found = lr.load_shapes(self.shapes)
        return None, lambda network, *given, **how: lr.fit(found.apply(network).train(), *given, **how)


@dataclass(frozen=True)
class TrainingOptions:
    """The recipe, and what is changed of it."""

    recipe: Annotated[str | None, option("A name (`lowrank recipes`); else images choose.", panel=TRAINING)] = None
    epochs: Annotated[int | None, option("Epochs to train at most.", panel=TRAINING)] = None
    batch_size: Annotated[int | None, option("Images per step, over all processes.", panel=TRAINING)] = None
    lr: Annotated[float | None, option("Learning rate at the start.", panel=TRAINING)] = None
    find_lr: Annotated[bool, option("Only test rates and suggest one.", "--find-lr", panel=TRAINING)] = False
    settings: opt.Settings = None

    def read(self, file: dict[str, Any]) -> tuple[Recipe, Callable[[int, nn.Module], Recipe], dict[str, Any]]:
        """The recipe, how it adapts to images and network, and the settings that are no part of it.

        Settings include the recipe's norm, if it was set. Options replace what --config says, and --set replaces
        both. A recipe that was named does not adapt.
        """
        from lowrank_cnn.train.recipe import RunSettings, changed, parse_settings, read_value
        from lowrank_cnn.train.recipes import suited

        own = {"epochs": self.epochs, "batch_size": self.batch_size, "lr": self.lr}
        typed = parse_settings(self.settings or [])
        if "name" in typed:
            raise LowRankError(f"a recipe is chosen by its name with --recipe {typed['name']}, not with --set.")
        given = file | {name: value for name, value in own.items() if value is not None} | typed
        run = {field.name: given.pop(field.name) for field in fields(RunSettings) if field.name in given}
        rare = {name: read_value(name, kind, given.pop(name)) for name, kind in RARE.items() if name in given}
        recipe = lr.get_recipe("modern" if self.recipe is None else self.recipe, **given)
        changed(RunSettings(), run)  # refused now, before images are read
        adapted = partial(suited, recipe, given=given) if self.recipe is None else lambda *_: recipe
        return recipe, adapted, run | rare | ({"norm": recipe.norm} if "norm" in given else {})


@dataclass(frozen=True)
class RunOptions:
    """The options of `fit`: the device of the run, and its folder."""

    out: Annotated[Path | None, option("Directory for checkpoints and the record.", "--out", "-o")] = None
    resume: Annotated[bool, option("Resume the run in --out.", "--resume")] = False
    seed: Annotated[int, option("Seed of weights, data order, dropout.", panel=TRAINING)] = 0
    teacher: Annotated[Path | None, option("A run to distil from, as well as labels.", panel=TRAINING)] = None
    device: opt.Device = "auto"
    log: Annotated[list[str] | None, option("tensorboard, csv, wandb.", metavar="<name>")] = None


# `--config FILE`: options of the command, settings and a recipe from a TOML or JSON file, never code.
#
#     model = "nin-c3-lr"
#     data = "photos"
#     image-size = 64
#
#     [recipe]
#     name = "modern"
#     optimizer = "adamw"
#
# An option that is typed replaces that of the file. `recipe = "modern"` chooses a recipe as it is.


def read_config(path: Path) -> dict[str, Any]:
    """The options of a file, and under `recipe` the fields of one."""
    try:
        text = read_text(path, most=2**20)
        found = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except OSError as error:
        raise LowRankError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:  # of either format, and of text that is not UTF-8
        raise LowRankError(f"{path} is not TOML or JSON: {first_line(error)}.") from error
    if not isinstance(found, dict) or not isinstance(found.get("recipe", {}), dict | str):
        raise LowRankError(f"{path} must hold options by name, and a table [recipe] with the fields of a recipe.")
    return found


def _apply(context: typer.Context, path: Path | None) -> dict[str, Any]:
    """Make the file's options the defaults of the command, and return its settings and fields of the recipe."""
    values = {} if path is None else read_config(path)
    recipe = values.pop("recipe", {})
    settings = {"name": recipe} if isinstance(recipe, str) else dict(recipe)
    if "name" in settings:  # the recipe that the other fields change, as --recipe says it
        values["recipe"] = settings.pop("name")
    options = {
        word.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        for word in (*parameter.opts, parameter.name or "")
    }
    given = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in options and name != "config":
            several = getattr(options[name], "multiple", False) and not isinstance(value, list)
            given[options[name].name] = [value] if several else value
        elif is_setting(name):
            settings[name] = value
        else:
            raise LowRankError(f"{path} sets {key!r}, which is no option: {nearest(key, options)}")
    context.default_map = {**(context.default_map or {}), **given}
    return settings


_FILE: dict[str, Any] = {"parser": Path, "metavar": "<path>", "callback": _apply, "is_eager": True}
Config = Annotated[Any, option("TOML or JSON file with these options.", "--config", **_FILE)]


@grouped
def train_command(
    *,
    model: Annotated[str, typer.Argument(help="Name (`lowrank models`), run, file, or path.py:function.")],
    data: Annotated[str, option("Folder, .csv, shards, Hub name or digits.", panel=IMAGES)],
    images: DataOptions,
    workers: opt.Workers = 0,
    network: NetworkOptions,
    training: TrainingOptions,
    run: RunOptions,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Train a network, from scratch or from trained weights.

    A run can be killed at any time and resumed. Under torchrun, all its processes train together. --set changes
    fields of the recipe, and rare settings that docs/commands.md lists.

    Examples:

      lowrank train nin-c3-lr --data digits --recipe digits --out runs/first
      lowrank train vgg11-gmp-lr --data photos --image-size 64 -o runs/photos
      lowrank train runs/photos --data photos --set quantize=int8 --lr 0.001
    """
    from lowrank_cnn.cli.source import check_model, find_model, is_path, is_weights, remember, remembered
    from lowrank_cnn.data import open_data
    from lowrank_cnn.train import inputs
    from lowrank_cnn.train.distributed import resolve_device, resolve_precision, seed_generators
    from lowrank_cnn.train.progress import check_loggers
    from lowrank_cnn.train.recipes import defaults_in_words
    from lowrank_cnn.train.run_folder import RunDirectory

    recipe, adapted, rare = training.read(config)
    scheme, train = network.training()
    pretrained = network.pretrained is not None or is_weights(model)
    cost = network.macs if network.thin is None else network.thin
    # Trained weights are made cheaper when their images are known, and so is a network within a budget.
    parsed = None if scheme is None else lr.parse_scheme(scheme)
    later = parsed if pretrained or cost is not None else None
    norm, stride, held = rare.pop("norm", None), rare.pop("stride", None), rare.pop("hold_gb", 2.0)
    # The recipe chooses norm and pool, except for trained weights and for networks that are not ours.
    building = {"norm": norm} if network.pretrained or is_path(model) else recipe.network()
    building |= {"scheme": None if later else scheme, "width": network.width, "stride": stride}
    building["pretrained"] = network.pretrained
    check_number("hold_gb", held, least=0)
    bytes_held = int(min(held, 2**30) * 2**30)  # of inf as well
    options = {"resident_bytes": bytes_held, "channels": rare.pop("channels", None)}
    options |= {"bad": rare.pop("bad", "skip"), "progress": not as_json, **vars(images)}
    seed_generators(run.seed)
    # Everything that can be refused is, before the images are read, which may take long.
    check_model(model, **building)
    resolve_precision(recipe.precision, resolve_device(run.device))
    check_loggers(run.log or ())
    directory = RunDirectory.open(run.out, data, resume=run.resume)
    if directory and not run.resume:
        directory.check_free()
    reading = partial(open_data, data, **options)
    found = reading()
    seed_generators(run.seed)
    source = find_model(model, into=network.into, classes=found.classes, channels=found.test.channels, **building)
    wish = {"input_size": source.input_size, "sized": images.image_size is not None, "tuned": is_weights(model)}
    wanted = inputs.as_network_wants(found, source.network, recipe, reading, **wish)
    inputs.check_classes(wanted)
    teacher = run.teacher and _load_teacher(run.teacher, network.into or model)
    if later or network.thin is not None:
        size = inputs.input_size(wanted.test, inputs.augmentation(recipe))
        source = source.cheaper(later and str(later), cost, size, pretrained=pretrained)
        teacher = teacher or _own_teacher(source.dense, wanted, recipe, size)
    inputs.check_network(source.network, wanted, recipe)
    recipe = adapted(inputs.trained_on(wanted, recipe), source.network)
    if first_process() and not as_json:
        _print_start(wanted, recipe, source.remark, tuned=wanted is not found and is_weights(model))
        if training.recipe is None:
            console.print(defaults_in_words(recipe, inputs.trained_on(wanted, recipe)))
        if run.out is None and not training.find_lr:
            console.print("This run is not saved: give --out to keep checkpoints and the record.")
        if teacher and not run.teacher:
            console.print("The network as it was is the teacher (--set distill_weight=0 trains without it).")
    if training.find_lr:
        how = {"workers": workers, **rare, "seed": run.seed, "device": run.device}
        return _find_rate(source.network, wanted, recipe, run.out, as_json=as_json, **how)
    if run.out and first_process():
        remember(network.into or remembered(model) or model, run.out)
    told = f"{wanted.train.problems}{wanted.test.problems}"
    how = {"workers": workers, **rare, **vars(run), "teacher": teacher, "log": run.log or ()}
    record = train(source.network.train(), wanted, recipe, progress=not as_json, **how)
    if not first_process():
        return None
    if as_json:
        name, out = record.model["name"], str(run.out) if run.out else None
        return print_json({"model": name, "out": out, **record.result})
    _print_result(record)
    if f"{wanted.train.problems}{wanted.test.problems}" != told:  # a stream finds them on its way
        print_problems(wanted)
    if run.out:
        named = ["--class-names", str(images.class_names)] if images.class_names else []
        hint = shlex.join(["lowrank", "evaluate", str(run.out), "--data", data, *named])
        console.print(f"The run is in {run.out}: try `{hint}`", soft_wrap=True)
    return None


def _find_rate(network: Any, data: Data, recipe: Recipe, out: Path | None, *, as_json: bool, **how: Any) -> None:
    """Print the learning rate that a range test suggests, and draw its losses into the directory of the run."""
    from lowrank_cnn.report.charts import rates_spec
    from lowrank_cnn.report.style import save_charts

    tested, drawn = lr.find_lr(network, data, recipe, **how), None
    told = "With --out DIR, DIR/find-lr.svg shows the losses."
    if out is not None:
        try:
            drawn = str(save_charts([rates_spec(tested)], out / "find-lr.svg"))
            told = f"{drawn} shows the losses."
        except MissingExtra as missing:
            told = f"There is no picture: {missing}"
    if as_json:
        return print_json({**asdict(tested), "picture": drawn})
    console.print(f"{tested} {told}", soft_wrap=True)
    return None


def _load_teacher(path: Path, into: str) -> Trained | Path:
    """The network of a run; one that is not ours is built by the function that builds the student."""
    from lowrank_cnn.cli.source import find_into, is_foreign
    from lowrank_cnn.train.trained import is_own, load_checkpoint

    own = is_foreign(into) and is_own(path)
    return load_checkpoint(path, network=find_into(into, path)) if own else path


def _own_teacher(network: Any, data: Data, recipe: Recipe, size: Any) -> Trained | None:
    """The network that was made cheaper, if it was trained on such images and for these classes."""
    from lowrank_cnn.train.trained import carried_by

    known = carried_by(network)
    alike = known and (known.classes, known.input_size, known.recipe.preprocess)
    return known if alike == (data.classes, tuple(size), recipe.preprocess) else None


def _print_start(data: Data, recipe: Recipe, remark: str, *, tuned: bool) -> None:
    from lowrank_cnn.train.optimizers import warmup_epochs
    from lowrank_cnn.train.recipe import Recipe

    values, defaults = recipe.to_dict() | {"warmup": warmup_epochs(recipe)}, Recipe(name=recipe.name).to_dict()
    usual = {"batch_size", "epochs", "lr", "optimizer", "schedule"}
    told = [f"  {field}={value}" for field, value in values.items() if field in usual or value != defaults[field]]
    console.print(f"Recipe: {recipe.name}{''.join(told)} (the record has every field)")
    counts = f"{len(data.train):,} to train on, {len(data.test):,} to test on"
    size = f"{'x'.join(map(str, data.train.size[1:]))} pixels" if data.train.size else "of many sizes"
    console.print(f"Images: {data.name}, {counts}, {counted(len(data.classes), 'class')}, {size}")
    if held := data.details.get("val_split"):
        console.print(_held_out_in_words(data, held["share"]))
    if data.train.size and max(data.train.size[1:]) > 512:
        console.print("Images of this size train slowly: --image-size 224 brings them to 224x224.")
    if data.details.get("sized_by"):
        console.print("Images are resized to the size that the network is for; --image-size sets another.")
    if tuned and data.train.size:
        console.print("Images are as large as those that the network was trained on; --image-size sets another.")
    if remark:
        console.print(remark)
    print_problems(data)


def _held_out_in_words(data: Data, share: float) -> str:
    """How many images are held out. Classes of few images may have none among them, or all."""
    rounded = f"about {share:.0%} of each class" if share >= 0.01 else f"a share of {share:g}"
    told = f"There are no test images: {counted(len(data.test), 'image')}, {rounded}, are held out (--val-split)."
    tested = set(data.test.labels.tolist())
    if absent := [name for number, name in enumerate(data.classes) if number not in tested]:
        told += f" Among them are none of {counted(len(absent), 'class')} ({first_few(absent)})."
    return told


def _print_result(record: Record) -> None:
    r, data = record.result, record.data
    more = {"MACs": si(r["macs"]) if r["macs"] else "", "params": si(r["params"])}
    more |= {"seconds": f"{r['seconds']:.1f}", "images/s": f"{r['images_per_second']:,.0f}"}
    print_accuracy(f"Trained on {data['name']}", record.model["name"], r, len(data["classes"]), **more)


def _learn(network: Any, *given: Any, **options: Any) -> Record:
    """Learn shapes, and print them."""
    found = lr.learn_shapes(network, *given, **options)
    if options.get("progress") and first_process():
        console.print(f"{found.shapes}\n{found.macs:.3f} of the MACs")
    return found.record
