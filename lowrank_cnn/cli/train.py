"""The command `lowrank train`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lowrank_cnn.cli.config import Config, config_recipe
from lowrank_cnn.cli.options import DataPath, Json, Model, grouped
from lowrank_cnn.cli.show import console, print_json, print_problems, print_table
from lowrank_cnn.cli.train_options import ImageOptions, NetworkOptions, RecipeOptions, RunOptions
from lowrank_cnn.system.processes import first_process
from lowrank_cnn.system.text import counted, first_few, si

if TYPE_CHECKING:
    from lowrank_cnn.data import Data
    from lowrank_cnn.train import Recipe, Record


@grouped
def train_command(
    context: typer.Context,
    model: Model,
    data: DataPath,
    network: NetworkOptions,
    training: RecipeOptions,
    run: RunOptions,
    images: ImageOptions,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Train a network, from scratch or from trained weights.

    A run can be killed at any time and resumed. Under torchrun, all its processes train together.

    Examples:

      lowrank train nin-c3-lr --data digits --recipe digits --width 0.25 --out runs/first
      lowrank train vgg11-gmp-lr --data photos --image-size 64 --out runs/photos
      lowrank train torchvision:resnet18 --pretrained default --scheme lr --data photos --out runs/r18
      lowrank train nin-c3-lr --data photos --out runs/photos --resume
      lowrank train vgg11-gmp --data photos --scheme "learned(kx1, 1xk)" --macs 0.4 --out runs/shapes
      lowrank train vgg11-gmp --data photos --shapes runs/shapes/shapes.json --out runs/again
      lowrank train runs/photos --data photos --quantize int8 --lr 0.001 --epochs 5 --out runs/int8
    """
    from lowrank_cnn.cli.source import build_for, check_model, is_weights
    from lowrank_cnn.train.determinism import seed_generators
    from lowrank_cnn.train.failure import may_end_process
    from lowrank_cnn.train.opening import as_network_wants, check_network
    from lowrank_cnn.train.score import check_classes

    recipe = training.resolve(config_recipe(context), network.norm)
    scheme, train = network.training()
    building, reading = network.building(model, scheme, recipe), images.reading(data, progress=not as_json)
    seed_generators(run.seed)
    check_model(model, **building)  # before the images are read, which may take long
    run.check(recipe.precision, data)
    found = reading()
    seed_generators(run.seed)
    source = build_for(found, model, into=network.into, **building)
    wish = {"input_size": source.input_size, "sized": images.image_size is not None, "tuned": is_weights(model)}
    wanted = as_network_wants(found, source.network, recipe, reading, **wish)
    check_classes(wanted)
    check_network(source.network, wanted, recipe)
    if not as_json:
        _print_start(wanted, recipe, run.out, source.remark, tuned=wanted is not found and is_weights(model))
    told = None if as_json else _problems_of(wanted)
    with may_end_process():
        record = train(source.network.train(), wanted, recipe, progress=not as_json, **run.for_fit())
    _print_result(record, run.out, as_json)
    if told is not None and first_process() and _problems_of(wanted) != told:  # a stream finds them on its way
        print_problems(wanted)
    if run.out and not as_json and first_process():
        hint = _next_command(record, run.out, data, network.into or model, images.class_names)
        console.print(f"The run is in {run.out}: try `{hint}`", markup=False, soft_wrap=True)


def _problems_of(data: Data) -> tuple[str, str]:
    return str(data.train.problems), str(data.test.problems)


def _next_command(record: Record, out: Path, data: str, source: str, names: Path | None) -> str:
    """The command that evaluates the run. A run holds no code, so --into names a network that is not ours."""
    from lowrank_cnn.models.rebuild import entry_description

    ours = entry_description(record.model)["model"] is not None
    into, named = [] if ours else ["--into", source], ["--class-names", str(names)] if names else []
    return shlex.join(["lowrank", "evaluate", str(out), "--data", data, *into, *named])


def _told(recipe: Recipe) -> str:
    """The name, the usual settings, and every field that differs from its default."""
    from lowrank_cnn.train.recipe import Recipe
    from lowrank_cnn.train.schedule import warmup_epochs

    values, defaults = recipe.to_dict() | {"warmup": warmup_epochs(recipe)}, Recipe().to_dict()
    shown = {"batch_size", "epochs", "lr", "optimizer", "schedule"}
    told = [f"{field}={value}" for field, value in values.items() if field in shown or value != defaults[field]]
    return "  ".join([recipe.name, *(text for text in told if not text.startswith("name="))])


def _print_start(data: Data, recipe: Recipe, out: Path | None, remark: str, *, tuned: bool) -> None:
    if not first_process():
        return
    console.print(f"Recipe: {_told(recipe)} (the record has every field)", markup=False)
    counts = f"{len(data.train):,} to train on, {len(data.test):,} to test on"
    size = f"{data.train.size[1]}x{data.train.size[2]} pixels" if data.train.size else "of many sizes"
    console.print(f"Images: {data.name}, {counts}, {counted(len(data.classes), 'class')}, {size}", markup=False)
    if held := data.details.get("val_split"):
        console.print(_held_out_in_words(data, held["share"]), markup=False)
    if data.train.size and max(data.train.size[1:]) > 512:
        console.print("Images of this size train slowly: --image-size 224 brings them to 224x224.")
    if data.details.get("sized_by"):
        console.print("Images are resized to the size that the network is for; --image-size sets another.")
    if tuned and data.train.size:
        console.print("Images are as large as those that the network was trained on; --image-size sets another.")
    if remark:
        console.print(remark, markup=False)
    print_problems(data)
    if out is None:
        console.print("This run is not saved: give --out to keep checkpoints and the record.", markup=False)


def _held_out_in_words(data: Data, share: float) -> str:
    """How many images are held out. Classes of few images may have none among them, or all."""
    rounded = f"about {share:.0%} of each class" if share >= 0.01 else f"a share of {share:g}"
    told = f"There are no test images: {counted(len(data.test), 'image')}, {rounded}, are held out (--val-split)."
    tested = set(data.test.labels.tolist())
    if absent := [name for number, name in enumerate(data.classes) if number not in tested]:
        told += f" Among them are none of {counted(len(absent), 'class')} ({first_few(absent)})."
    return told


def _print_result(record: Record, out: Path | None, as_json: bool) -> None:
    from lowrank_cnn.train.score import TOP_FIVE

    r = record.result
    if not first_process():
        return
    if as_json:
        print_json({"model": record.model["name"], "out": str(out) if out else None, **r})
        return
    top5 = {"top-5": f"{r['top5']:.2%}"} if len(record.data["classes"]) > TOP_FIVE else {}
    row = {"network": record.model["name"], "top-1": f"{r['top1']:.2%}", **top5, "n": f"{r['n']:,}"}
    row |= {"MACs": si(r["macs"]) if r["macs"] else "", "params": si(r["params"])}
    row |= {"seconds": f"{r['seconds']:.1f}", "images/s": f"{r['images_per_second']:,.0f}"}
    print_table(f"Trained on {record.data['name']}", tuple(row), [tuple(row.values())])
