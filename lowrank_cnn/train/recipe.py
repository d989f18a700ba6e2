"""A recipe: everything that decides how a network is trained, as one frozen row of plain values."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowrank_cnn.core.errors import LowRankError, check_type, nearest
from lowrank_cnn.core.text import counted
from lowrank_cnn.data.augment import AUTO_AUGMENTS


def parse_settings(settings: list[str]) -> dict[str, str]:
    """Settings of the command line, `["lr=0.05", "crop=none"]`, as overrides for `get_recipe`."""
    pairs = [setting.partition("=") for setting in settings]
    for field, sign, _ in pairs:
        if not sign:
            raise LowRankError(f"a setting is written field=value, as in lr=0.05; {field!r} has no '='.")
    return {field.strip().replace("-", "_"): value.strip() for field, _, value in pairs}


def read_value(field: str, kind: object, value: object) -> typing.Any:
    """The value as a field of this type wants it; text is understood as the command line writes it."""
    if isinstance(kind, types.UnionType):
        if value is None or str(value).lower() in ("none", ""):
            return None
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    try:
        return _READERS[kind](value)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        wanted = getattr(kind, "__name__", kind)
        raise LowRankError(f"{field} wants a value of type {wanted}, not {value!r}.") from error


def _read_text(value: object) -> str:
    """Text, or a number that names something; several names are joined as the command line writes them."""
    if isinstance(value, list | tuple):
        return ", ".join(_read_text(one) for one in value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(value)
    return str(value)


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
    str: _read_text,
    bool: _read_bool,
    int: _read_int,
    float: float,
    tuple[int, ...]: _read_numbers,
}


SCHEDULES = ("paper", "poly", "cosine", "triangle", "constant")
PREPROCESSING = ("standardize", "whiten")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adamw", "muon")
CLASS_WEIGHTS = ("none", "balanced")

QUANTIZE = ("none", "int8")
_ALLOWED = {
    "schedule": SCHEDULES,
    "preprocess": PREPROCESSING,
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "class_weights": CLASS_WEIGHTS,
    "auto_augment": AUTO_AUGMENTS,
    "quantize": QUANTIZE,
}
_LARGE = 10.0**9
_RANGES = {
    "batch_size": (1, _LARGE),
    "epochs": (1, _LARGE),
    "lr": (1e-12, _LARGE),
    "momentum": (0, 0.99999),
    "weight_decay": (0, _LARGE),
    "clip_norm": (0, _LARGE),
    "warmup": (0, _LARGE),
    "power": (0, _LARGE),
    "holdout": (0, _LARGE),
    "patience": (1, _LARGE),
    "levels": (0, _LARGE),
    "min_delta": (0, 1),
    "drop_factor": (1, _LARGE),
    "label_smoothing": (0, 0.999),
    "aux_weight": (0, _LARGE),
    "ema": (0, 1),
    "evaluate_every": (1, _LARGE),
    "zca_epsilon": (0, _LARGE),
    "resize": (1, _LARGE),
    "crop": (1, _LARGE),
    "pad": (0, _LARGE),
    "cutout": (0, _LARGE),
    "dropout": (0, 0.999),
    "beta2": (0, 0.99999),
    "layer_decay": (0.01, 1),
    "accumulate": (1, _LARGE),
    "early_stop": (0, _LARGE),
    "mixup": (0, 100),
    "cutmix": (0, 100),
    "zoom": (0.01, 1),
    "jitter": (0, 1),
    "distill_weight": (0, 1),
    "distill_temperature": (0.1, 100),
    "lr_start": (0, 1),
    "lr_end": (0, 1),
    "bias_rate": (1e-3, _LARGE),
    "lookahead": (0, _LARGE),
    "lookahead_decay": (0, 1),
    "test_shift": (0, _LARGE),
}


@dataclass(frozen=True)
class Recipe:
    """How to train. Every field is a plain value, so a recipe prints, compares, and travels as JSON.

    `holdout` takes images out of the training set (a share below 1, else a count) for every decision made
    on the way: the levelling-off rule and the best checkpoint. The test set decides nothing.
    `drop_epochs` replays a schedule of drops found that way, so that all training images can be used.

    - `optimizer`: sgd, adamw (`momentum` and `beta2` are its betas) or muon (biases and norms by sgd).
    - `layer_decay`: each layer's learning rate is that of the layer behind it times this, for fine-tuning.
    - `freeze`: names of parameters that are not trained, as patterns parted by commas (`features.*`);
      `backbone` is everything before the last layer.
    - `accumulate`: a batch is computed in this many parts, which takes less memory; batch norm sees one part.
    - `early_stop`: stop after this many evaluations without a gain on held-out images; 0 never stops early.
    - `class_weights`: balanced lets rare classes count as much as frequent ones.
    - `mixup`, `cutmix`: how evenly two images are blended, Beta(a, a); 0 blends none.
    - `zoom`: the least share of an image that a random resized crop shows; 1 shows all.
    - `jitter`: how far brightness, contrast and saturation may move.
    - `auto_augment`: none, trivial (TrivialAugment) or rand (RandAugment).
    - `distill_weight`, `distill_temperature`: how much a teacher's answers count, where `fit` is given one.
    - `output`: the name or number of the output with the class scores, of a network with several.
    - `quantize`: int8 trains with inputs and weights of layers rounded, as a file of `lr.quantize` runs them. It
      rounds the inputs of modules, not those of functions that a forward calls (`F.avg_pool2d`).
    Fields for short runs, which any network can use:
    - `schedule="triangle"` rises from `lr_start` of the rate over the warm-up and falls to `lr_end` of it.
    - `bias_rate`: batch norms' biases learn this many times faster, and decay as fast as weights do.
    - `lookahead`: steps after which the weights go back towards a slow average, by up to `lookahead_decay`.
    - `whiten_first`: the first layer whitens patches of the training images, and is not trained.
    - `alternate_mirror`: an image is mirrored every other epoch, and not by chance.
    - `test_mirror`, `test_shift`: logits are averaged over mirrored images, and over shifts by this many pixels.
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
    optimizer: str = "sgd"
    beta2: float = 0.999
    layer_decay: float = 1.0
    freeze: str = ""
    accumulate: int = 1
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
    early_stop: int = 0
    # the loss, and what is evaluated
    label_smoothing: float = 0.0
    aux_weight: float = 0.3
    class_weights: str = "none"
    distill_weight: float = 0.5
    distill_temperature: float = 2.0
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
    zoom: float = 1.0
    jitter: float = 0.0
    auto_augment: str = "none"
    mixup: float = 0.0
    cutmix: float = 0.0
    # the network and its arithmetic
    norm: str | None = None
    pool: str | None = None
    dropout: float | None = None
    output: str | None = None
    precision: str = "auto"
    quantize: str = "none"
    # short runs
    lr_start: float = 0.0
    lr_end: float = 0.0
    bias_rate: float = 1.0
    lookahead: int = 0
    lookahead_decay: float = 0.95**5
    whiten_first: bool = False
    alternate_mirror: bool = False
    test_mirror: bool = False
    test_shift: int = 0

    def __post_init__(self) -> None:
        for field, allowed in _ALLOWED.items():
            if (value := getattr(self, field)) not in allowed:
                raise LowRankError(f"{field} is one of {', '.join(allowed)}, not {value!r}.")
        for field, (low, high) in _RANGES.items():
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise LowRankError(f"{field} lies between {low:g} and {high:g}, not at {value}.")
        if any(epoch < 1 for epoch in self.drop_epochs):
            raise LowRankError(f"drop_epochs are numbers of epochs, 1 or more, not {min(self.drop_epochs)}.")
        if self.nesterov and self.momentum == 0:
            raise LowRankError("nesterov needs a momentum above 0.")
        if self.batch_size % self.accumulate:
            raise LowRankError(
                f"a batch of {counted(self.batch_size, 'image')} does not part into accumulate={self.accumulate} "
                "equal parts."
            )
        if self.early_stop and not self.holdout:
            raise LowRankError("early_stop watches held-out training images: set holdout (0.1, say).")
        if self.early_stop and self.levels:
            raise LowRankError("levels ends the run by itself: clear early_stop or levels.")
        if self.lookahead and self.ema:
            raise LowRankError("lookahead and ema both average weights: clear one (lookahead=0 or ema=0).")
        if self.alternate_mirror and not self.mirror:
            raise LowRankError("alternate_mirror says when images are mirrored: set mirror=true as well.")
        if self.levels and self.drop_epochs:
            raise LowRankError(
                "levels finds the drops and drop_epochs states them: clear one (drop_epochs= or levels=0)."
            )
        if self.levels and not self.holdout:
            raise LowRankError(
                "the levelling-off rule watches held-out training images: set holdout (0.1, say), "
                "or state known drops with drop_epochs and set levels=0."
            )

    def network(self) -> dict[str, Any]:
        """The options of `create_model` that the recipe is for."""
        return {"norm": self.norm, "pool": self.pool}

    def to_dict(self) -> dict[str, object]:
        """The recipe in values that JSON can hold."""
        return {**dataclasses.asdict(self), "drop_epochs": list(self.drop_epochs)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Recipe:
        """The recipe that `to_dict` wrote."""
        check_type("a recipe", values, dict)
        return changed(cls(), values)


def differences(one: Mapping[str, object], other: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Fields that train differently in two recipes of `to_dict`; those that an older one lacks have defaults."""
    first, second = Recipe.from_dict(one).to_dict(), Recipe.from_dict(other).to_dict()
    return {
        field: (value, second[field])
        for field, value in first.items()
        if value != second[field] and field not in ("name", "evaluate_every")
    }


def in_words(differ: Mapping[str, tuple[object, object]]) -> str:
    """Differences as a part of a sentence."""
    then, now = (", ".join(f"{field}={values[side]}" for field, values in differ.items()) for side in (0, 1))
    return f"{then}, not {now}"


def changed(recipe: Recipe, values: Mapping[str, object]) -> Recipe:
    """The recipe with some fields set by values or by the text of them."""
    kinds = typing.get_type_hints(Recipe)
    for field in values:
        if field not in kinds:
            raise LowRankError(f"a recipe has no field {field!r}: {nearest(field, kinds)}")
    read = {field: read_value(field, kinds[field], value) for field, value in values.items()}
    return dataclasses.replace(recipe, **read)
