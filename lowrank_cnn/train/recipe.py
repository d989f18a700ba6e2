"""Recipes: everything that decides how a network is trained, as one frozen row of plain values.

The paper's recipes follow its text and, where it is silent, the published solvers of the networks it starts
from. Weight decay acts on weights alone; biases and normalisation are left free, as those solvers did.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from lowrank_cnn.errors import LowRankError, nearest

SCHEDULES = ("paper", "poly", "cosine", "constant")
PREPROCESSING = ("standardize", "whiten")
PRECISIONS = ("auto", "fp32", "bf16")


@dataclass(frozen=True)
class Recipe:
    """How to train. Every field is a plain value, so a recipe prints, compares, and travels as JSON.

    `holdout` takes images out of the training set (a share below 1, else a count) for every decision made
    on the way: the levelling-off rule and the best checkpoint. The test set decides nothing.
    `drop_epochs` replays a schedule of drops found that way, so that all training images can be used.
    """

    name: str = "custom"
    # the optimiser
    batch_size: int = 128
    epochs: int = 200
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    clip_norm: float = 0.0
    # the schedule
    schedule: str = "constant"
    warmup: float = 0.0
    power: float = 0.5
    holdout: float = 0.0
    patience: int = 10
    levels: int = 0
    min_delta: float = 0.0005
    drop_factor: float = 10.0
    drop_epochs: tuple[int, ...] = ()
    # the loss, and what is evaluated
    label_smoothing: float = 0.0
    aux_weight: float = 0.3
    ema: float = 0.0
    evaluate_every: int = 1
    # the images
    preprocess: str = "standardize"
    zca_epsilon: float = 0.1
    resize: int | None = None
    crop: int | None = None
    pad: int = 0
    mirror: bool = True
    cutout: int = 0
    # the network and its arithmetic
    norm: str | None = None
    dropout: float | None = None
    precision: str = "auto"

    def __post_init__(self) -> None:
        for field, allowed in (
            ("schedule", SCHEDULES),
            ("preprocess", PREPROCESSING),
            ("precision", PRECISIONS),
        ):
            if (value := getattr(self, field)) not in allowed:
                raise LowRankError(f"{field} is one of {', '.join(allowed)}, not {value!r}.")
        for field, low, high in _RANGES:
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise LowRankError(f"{field} lies between {low:g} and {high:g}, not at {value}.")
        if self.nesterov and self.momentum == 0:
            raise LowRankError("nesterov needs a momentum above 0.")
        if self.levels and not (self.holdout or self.drop_epochs):
            raise LowRankError(
                "the levelling-off rule watches held-out training images: set holdout (0.1, say), "
                "or replay known drops with drop_epochs, or set levels=0."
            )

    def to_dict(self) -> dict[str, object]:
        """The recipe in values that JSON can hold."""
        return {**dataclasses.asdict(self), "drop_epochs": list(self.drop_epochs)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Recipe:
        """The recipe that `to_dict` wrote."""
        return changed(cls(), values)


_LARGE = 10.0**9
_RANGES = (
    ("batch_size", 1, _LARGE),
    ("epochs", 0, _LARGE),
    ("lr", 0, _LARGE),
    ("momentum", 0, 1),
    ("weight_decay", 0, _LARGE),
    ("clip_norm", 0, _LARGE),
    ("warmup", 0, _LARGE),
    ("power", 0, _LARGE),
    ("holdout", 0, _LARGE),
    ("patience", 1, _LARGE),
    ("levels", 0, _LARGE),
    ("min_delta", 0, 1),
    ("drop_factor", 1, _LARGE),
    ("label_smoothing", 0, 1),
    ("aux_weight", 0, _LARGE),
    ("ema", 0, 1),
    ("evaluate_every", 1, _LARGE),
    ("zca_epsilon", 0, _LARGE),
    ("resize", 1, _LARGE),
    ("crop", 1, _LARGE),
    ("pad", 0, _LARGE),
    ("cutout", 0, _LARGE),
    ("dropout", 0, 1),
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="nin-paper",
            batch_size=128,
            epochs=300,
            lr=0.1,
            weight_decay=1e-4,
            schedule="paper",
            holdout=0.1,
            patience=25,
            levels=2,
            preprocess="whiten",
            crop=30,
        ),
        Recipe(
            name="vgg-paper",
            batch_size=256,
            epochs=90,
            lr=0.01,
            weight_decay=5e-4,
            schedule="paper",
            holdout=0.02,
            patience=4,
            levels=3,
            resize=256,
            crop=224,
        ),
        Recipe(
            name="googlenet-paper",
            batch_size=32,
            epochs=60,
            lr=0.01,
            weight_decay=2e-4,
            schedule="poly",
            power=0.5,
            resize=256,
            crop=224,
        ),
        Recipe(
            name="modern",
            batch_size=128,
            epochs=200,
            lr=0.1,
            nesterov=True,
            weight_decay=5e-4,
            schedule="cosine",
            warmup=5.0,
            label_smoothing=0.1,
            ema=0.999,
            pad=4,
            cutout=8,
            norm="batch",
        ),
        Recipe(
            name="nin-modern",
            batch_size=128,
            epochs=56,
            lr=0.2,
            nesterov=True,
            weight_decay=5e-4,
            schedule="cosine",
            warmup=5.0,
            label_smoothing=0.1,
            ema=0.999,
            crop=32,
            pad=4,
            norm="batch",
            dropout=0.0,
        ),
        Recipe(
            name="nin-init",
            batch_size=128,
            epochs=10,
            lr=0.05,
            weight_decay=5e-4,
            schedule="cosine",
            preprocess="whiten",
            crop=30,
        ),
        Recipe(
            name="digits",
            batch_size=64,
            epochs=6,
            lr=0.1,
            nesterov=True,
            weight_decay=5e-4,
            schedule="cosine",
            warmup=1.0,
            crop=28,
            pad=2,
            mirror=False,
            norm="batch",
            dropout=0.0,
        ),
        Recipe(
            name="tiny-vgg",
            batch_size=128,
            epochs=30,
            lr=0.01,
            weight_decay=5e-4,
            schedule="paper",
            drop_epochs=(20, 26),
            evaluate_every=5,
            crop=56,
        ),
        Recipe(
            name="tiny-googlenet",
            batch_size=128,
            epochs=30,
            lr=0.02,
            weight_decay=2e-4,
            schedule="poly",
            power=0.5,
            warmup=1.0,
            evaluate_every=5,
            crop=56,
        ),
        Recipe(
            name="tiny-modern",
            batch_size=256,
            epochs=30,
            lr=0.05,
            nesterov=True,
            weight_decay=5e-4,
            schedule="cosine",
            warmup=2.0,
            label_smoothing=0.1,
            ema=0.999,
            evaluate_every=5,
            crop=56,
            norm="batch",
        ),
    )
}


def get_recipe(name: str, /, **overrides: object) -> Recipe:
    """A recipe of the table, with any field overridden by a value or by the text of one (`lr="0.05"`)."""
    if name not in RECIPES:
        raise LowRankError(f"there is no recipe {name!r}: {nearest(name, RECIPES)}")
    return changed(RECIPES[name], overrides)


def parse_settings(settings: list[str]) -> dict[str, str]:
    """Settings of the command line, `["lr=0.05", "crop=none"]`, as overrides for `get_recipe`."""
    pairs = [setting.partition("=") for setting in settings]
    for field, sign, _ in pairs:
        if not sign:
            raise LowRankError(f"a setting is written field=value, as in lr=0.05; {field!r} has no '='.")
    return {field.strip().replace("-", "_"): value.strip() for field, _, value in pairs}


def changed(recipe: Recipe, values: Mapping[str, object]) -> Recipe:
    """The recipe with some fields set by values or by the text of them."""
    kinds = typing.get_type_hints(Recipe)
    for field in values:
        if field not in kinds:
            raise LowRankError(f"a recipe has no field {field!r}: {nearest(field, kinds)}")
    return dataclasses.replace(recipe, **{field: _read(field, kinds[field], v) for field, v in values.items()})


def _read(field: str, kind: object, value: object) -> typing.Any:
    """The value as the field's type wants it; text is understood as the command line writes it."""
    if isinstance(kind, types.UnionType):
        if value is None or str(value).lower() in ("none", ""):
            return None
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    try:
        return _READERS[kind](value)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        wanted = getattr(kind, "__name__", kind)
        raise LowRankError(f"{field} wants a value of type {wanted}, not {value!r}.") from error


def _read_bool(value: object) -> bool:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[str(value).lower()]


def _read_int(value: object) -> int:
    number = float(value)  # type: ignore[arg-type]
    if number != int(number):
        raise ValueError(value)
    return int(number)


def _read_numbers(value: object) -> tuple[int, ...]:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    return tuple(_read_int(item) for item in items)  # type: ignore[union-attr]


_READERS: dict[object, typing.Callable[[typing.Any], object]] = {
    str: str,
    bool: _read_bool,
    int: _read_int,
    float: float,
    tuple[int, ...]: _read_numbers,
}
