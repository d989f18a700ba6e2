"""A recipe says how a network is trained, run settings how that is carried out: frozen rows of plain values."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lowrank_cnn.core.errors import LowRankError, check_type, nearest, setting
from lowrank_cnn.core.text import counted
from lowrank_cnn.data.augment import AUTO_AUGMENTS

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
LARGE = 10.0**9


def declare(
    default: Any,
    *,
    limits: tuple[float, float] | None = None,
    options: Collection[str] = (),
    fixed: bool = False,
) -> Any:
    """A field with its limits or options. A `fixed` one, on which saved state depends, cannot change later."""
    return dataclasses.field(default=default, metadata={"limits": limits, "options": options, "fixed": fixed})


def within(default: Any, least: float = 0, most: float = LARGE, *, fixed: bool = False) -> Any:
    return declare(default, limits=(least, most), fixed=fixed)


@dataclass(frozen=True)
class Checked:
    """A dataclass whose fields stay within what `declare` says of them."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, options, limits = getattr(self, field.name), *map(field.metadata.get, ("options", "limits"))
            if options and value not in options:
                raise LowRankError(f"{field.name} is one of {', '.join(options)}, not {value!r}.")
            if limits and value is not None and not limits[0] <= value <= limits[1]:
                raise LowRankError(f"{field.name} lies between {limits[0]:g} and {limits[1]:g}, not at {value}.")
        for sentence in self.conflicts():
            raise LowRankError(sentence)

    def conflicts(self) -> Iterable[str]:
        """What to change where fields exclude each other."""
        return ()


@dataclass(frozen=True)
class RunSettings(Checked):
    """How a run is carried out, where that is seldom changed: `fit(..., NAME=VALUE)` or `--set NAME=VALUE`.

    - `workers`: processes that decode streamed images.
    - `compile`: true trains through torch.compile. By default a resumed run does what it did before, and a new one
      does not: without it, `fit` was faster in every record.
    - `cuda_graphs`: false launches the kernels of a step one by one.
    - `checkpoint_every`: seconds between checkpoints.
    - `deterministic`: the same bits whenever the run is repeated or resumed, on the CPU or on one GPU.
    """

    workers: int = within(0)
    compile: bool | None = None
    cuda_graphs: bool = True
    checkpoint_every: float = within(30.0)
    deterministic: bool = False


@dataclass(frozen=True)
class Recipe(Checked):
    """How to train. Every field is a plain value, so a recipe prints, compares, and travels as JSON.

    `holdout` takes images out of the training set (a share below 1, else a count) for every decision made
    on the way: the levelling-off rule and the best checkpoint. The test set decides nothing.
    `drop_epochs` replays a schedule of drops found that way, so that all training images can be used.

    - `optimizer`: sgd, adamw (`momentum` and `beta2` are its betas) or muon (biases and norms by sgd).
    - `layer_decay`: each layer's learning rate is that of the layer behind it times this, for fine-tuning.
    - `strip_rate`, `join_rate`: how many times faster 1xk and kx1 filters learn, and the 1x1 filters of a join.
    - `helper`: the share of the training in which a dense conv beside each composite fades; it is then removed.
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
    batch_size: int = within(128, 1, fixed=True)
    epochs: int = within(200, 1)
    lr: float = within(0.1, 1e-12)
    momentum: float = within(0.9, 0, 0.99999)
    nesterov: bool = False
    weight_decay: float = within(5e-4)
    clip_norm: float = within(0.0)
    optimizer: str = declare("sgd", options=("sgd", "adamw", "muon"), fixed=True)
    beta2: float = within(0.999, 0, 0.99999)
    layer_decay: float = within(1.0, 0.01, 1)
    strip_rate: float = within(1.0, 1e-3)
    join_rate: float = within(1.0, 1e-3)
    helper: float = within(0.0, 0, 1, fixed=True)
    freeze: str = declare("", fixed=True)
    accumulate: int = within(1, 1)
    # the schedule
    schedule: str = declare("constant", options=("paper", "poly", "cosine", "triangle", "constant"))
    warmup: float = within(0.0)
    power: float = within(0.5)
    holdout: float = within(0.0, fixed=True)
    patience: int = within(10, 1)
    levels: int = within(0)
    min_delta: float = within(0.0005, 0, 1)
    drop_factor: float = within(10.0, 1)
    drop_epochs: tuple[int, ...] = ()
    early_stop: int = within(0)
    # the loss, and what is evaluated
    label_smoothing: float = within(0.0, 0, 0.999)
    aux_weight: float = within(0.3)
    class_weights: str = declare("none", options=("none", "balanced"))
    distill_weight: float = within(0.5, 0, 1)
    distill_temperature: float = within(2.0, 0.1, 100)
    ema: float = within(0.0, 0, 1, fixed=True)
    evaluate_every: int = within(1, 1)
    # the images
    preprocess: str = declare("standardize", options=("standardize", "whiten"), fixed=True)
    zca_epsilon: float = within(0.1, fixed=True)
    resize: int | None = within(None, 1, fixed=True)
    crop: int | None = within(None, 1, fixed=True)
    pad: int = within(0)
    mirror: bool = True
    cutout: int = within(0)
    zoom: float = within(1.0, 0.01, 1)
    jitter: float = within(0.0, 0, 1)
    auto_augment: str = declare("none", options=AUTO_AUGMENTS)
    mixup: float = within(0.0, 0, 100)
    cutmix: float = within(0.0, 0, 100)
    # the network and its arithmetic
    norm: str | None = declare(None, fixed=True)
    pool: str | None = declare(None, fixed=True)
    dropout: float | None = within(None, 0, 0.999)
    output: str | None = None
    precision: str = declare("auto", options=PRECISIONS)
    quantize: str = declare("none", options=("none", "int8"))
    # short runs
    lr_start: float = within(0.0, 0, 1)
    lr_end: float = within(0.0, 0, 1)
    bias_rate: float = within(1.0, 1e-3)
    lookahead: int = within(0, fixed=True)
    lookahead_decay: float = within(0.95**5, 0, 1)
    whiten_first: bool = declare(False, fixed=True)
    alternate_mirror: bool = declare(False, fixed=True)
    test_mirror: bool = False
    test_shift: int = within(0)

    def conflicts(self) -> Iterable[str]:
        if (first := min(self.drop_epochs, default=1)) < 1:
            yield f"drop_epochs are numbers of epochs, 1 or more, not {first}."
        if self.nesterov and self.momentum == 0:
            yield "nesterov needs a momentum above 0."
        if self.batch_size % self.accumulate:
            batch = counted(self.batch_size, "image")
            yield f"a batch of {batch} does not part into accumulate={self.accumulate} equal parts."
        if self.early_stop and not self.holdout:
            yield "early_stop watches held-out training images: set holdout (0.1, say)."
        if self.helper and self.quantize != "none":
            yield f"helper and quantize exclude each other: clear one ({setting('helper', 0)})."
        if self.early_stop and self.levels:
            yield "levels ends the run by itself: clear early_stop or levels."
        if self.lookahead and self.ema:
            either = f"{setting('lookahead', 0)} or {setting('ema', 0)}"
            yield f"lookahead and ema both average weights: clear one ({either})."
        if self.alternate_mirror and not self.mirror:
            yield f"alternate_mirror says when images are mirrored: set {setting('mirror', True)} as well."
        if self.levels and self.drop_epochs:
            either = f"{setting('drop_epochs', ())} or {setting('levels', 0)}"
            yield f"levels finds the drops and drop_epochs states them: clear one ({either})."
        if self.levels and not self.holdout:
            known = f"state known drops with drop_epochs and {setting('levels', 0)}"
            yield f"the levelling-off rule watches held-out training images: set holdout (0.1, say), or {known}."

    def network(self) -> dict[str, Any]:
        """The options of `create_model` that the recipe is for."""
        return {"norm": self.norm, "pool": self.pool}

    def to_dict(self) -> dict[str, object]:
        """The recipe in values that JSON can hold."""
        return {**dataclasses.asdict(self), "drop_epochs": list(self.drop_epochs)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> typing.Self:
        """The recipe that `to_dict` wrote; fields that an older version did not have get their defaults."""
        check_type("a recipe", values, dict)
        return changed(cls(), values)


def differences(one: Mapping[str, object], other: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Fields that train differently in two recipes of `to_dict`."""
    first, second = Recipe.from_dict(one).to_dict(), Recipe.from_dict(other).to_dict()
    return {
        field: (value, second[field])
        for field, value in first.items()
        if value != second[field] and field not in ("name", "evaluate_every")
    }


def in_words(differ: Mapping[str, tuple[object, object]]) -> str:
    then, now = (", ".join(f"{field}={values[side]}" for field, values in differ.items()) for side in (0, 1))
    return f"{then}, not {now}"


Settings = TypeVar("Settings", bound=Checked)


def changed(settings: Settings, values: Mapping[str, object]) -> Settings:
    """A recipe, or settings of a run, with some fields set by values or by the text of them."""
    kinds = typing.get_type_hints(type(settings))
    for field in values:
        if field not in kinds:
            raise LowRankError(f"a recipe has no field {field!r}: {nearest(field, kinds)}")
    read = {field: read_value(field, kinds[field], value) for field, value in values.items()}
    return dataclasses.replace(settings, **read)


def parse_settings(settings: Collection[str]) -> dict[str, str]:
    """Settings of the command line, `["lr=0.05", "crop=none"]`, by name."""
    pairs = [setting.partition("=") for setting in settings]
    for field, sign, _ in pairs:
        if not sign:
            raise LowRankError(f"a setting is written field=value, as in lr=0.05; {field!r} has no '='.")
    return {field.strip().replace("-", "_"): value.strip() for field, _, value in pairs}


def read_value(field: str, kind: object, value: object) -> Any:
    """The value as a field of this type wants it; text is understood as the command line writes it."""
    if isinstance(kind, types.UnionType):
        if value is None or str(value).lower() in ("none", "auto", ""):
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


def _read_int(value: Any) -> int:
    number = float(value)
    if number != int(number):
        raise ValueError(value)
    return int(number)


def _read_numbers(value: Any) -> tuple[int, ...]:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    return tuple(_read_int(item) for item in items)


_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_READERS: dict[object, typing.Callable[[Any], object]] = {
    str: _read_text,
    bool: lambda value: _TRUTH[str(value).lower()],
    int: _read_int,
    float: float,
    tuple[int, ...]: _read_numbers,
}
