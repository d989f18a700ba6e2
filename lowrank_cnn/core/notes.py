"""What the library knows of a module: one typed record, kept in one private attribute of that module.

A user's module may have a child or an attribute of any name, `plan` or `input_size` say, and that one stays the
user's. The record survives `copy.deepcopy` and `torch.save`. It is no parameter, buffer or child, so tools that
walk those do not see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lowrank_cnn.core.text import html_table, si, text_table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowrank_cnn.core.clock import Sample

GIVEN = "as given"
"""How a block runs that no other way is faster for."""


class AsDict:
    """A dataclass whose values JSON can hold."""

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Kept:
    """A conv that was left as it was, and why."""

    name: str
    layer: str
    reason: str


@dataclass(frozen=True)
class Change:
    """A conv that was rewritten: its filters before and after, by which scheme, and its parameters."""

    name: str
    before: str
    after: str
    scheme: str
    params_before: int
    params_after: int


@dataclass(frozen=True)
class Conversion(AsDict):
    """What was done to a network; `changed` is enough to do it again."""

    changed: tuple[Change, ...] = ()
    kept: tuple[Kept, ...] = ()

    def __str__(self) -> str:
        """Line by line what changed, in weights; `conversion_costs` has the multiply-accumulates."""
        return "\n\n".join(text_table(columns, rows) for _, columns, rows in self._tables())

    def _repr_html_(self) -> str:
        """The tables that notebooks show."""
        return "".join(html_table(columns, rows, title) for title, columns, rows in self._tables())

    def _tables(self) -> Iterator[tuple[str, tuple[str, ...], Sequence[Sequence[object]]]]:
        changed = [(c.name, c.before, c.after, c.params_before, c.params_after) for c in self.changed]
        kept = [(k.name, k.layer, k.reason) for k in self.kept]
        yield "Rewritten", ("layer", "filters", "now", ">weights", ">now"), changed
        if kept:
            yield "Left as they were", ("left", "layer", "why"), kept


@dataclass(frozen=True)
class Fitted(AsDict):
    """A layer: its number of basis filters, and the share of its squared weights that they keep.

    `error` is the relative squared error of the layer's output on the images that it was refitted on, if any.
    """

    name: str
    m: int
    energy: float
    error: float | None = None


@dataclass(frozen=True)
class Merging(AsDict):
    """One layer: what went into it, and the largest error relative to the largest output, or why it stayed."""

    name: str
    parts: tuple[str, ...]
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class TrainingCard:
    """What a trained network carries beside its weights: its recipe and data as JSON, preprocessing as tensors."""

    card: Mapping[str, Any]
    preprocess: Mapping[str, Tensor]


@dataclass(frozen=True)
class Decision:
    """A block: its epilogue, its multiply-accumulates for this input, the milliseconds of each way, the choice.

    `failed` says why other ways were left out.
    """

    name: str
    epilogue: str
    macs: int
    times: Mapping[str, float]
    choice: str
    failed: Mapping[str, str] = field(default_factory=dict)

    def refused(self, reason: str) -> Decision:
        """The same decision taken back, since with it the whole network fails or differs."""
        return replace(self, choice=GIVEN, failed={**self.failed, self.choice: reason})


@dataclass(frozen=True)
class NetworkPlan(AsDict):
    """All decisions, and the whole network before and after.

    `used` is False where the network was better as given, and `reason` says why nothing could be planned.
    `neighbours` is whether pools and response norms run by kernels too, on a GPU.
    """

    input: tuple[int, ...]
    device: str
    decisions: tuple[Decision, ...]
    before: Sample
    after: Sample
    used: bool
    reason: str = ""
    neighbours: bool = False

    @property
    def ways(self) -> dict[str, str]:
        """The blocks that run in another way than given, by name; none where the plan is not used."""
        return {row.name: row.choice for row in self.decisions if row.choice != GIVEN} if self.used else {}

    def __str__(self) -> str:
        """The decision table: for each block its MACs, the milliseconds of each way, and the one chosen."""
        if self.reason:
            return f"not planned: {self.reason}"
        table = text_table(*self._table())
        verdict = "the plan is used" if self.used else "nothing gained: as given"
        whole = f"whole network: {self.before.ms:.3f} ms before, {self.after.ms:.3f} after; {verdict}"
        notes = [f"{row.name}, {way}: {why}" for row in self.decisions for way, why in row.failed.items()]
        return "\n".join([table, *notes, whole])

    def _repr_html_(self) -> str:
        """The decision table that notebooks show."""
        if self.reason:
            return html_table(("plan",), [(f"not planned: {self.reason}",)])
        whole = (
            f"Milliseconds on {self.device}. Whole network: {self.before.ms:.3f} before, {self.after.ms:.3f} after"
        )
        return html_table(*self._table(), whole)

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        ways = list(dict.fromkeys(way for row in self.decisions for way in row.times))
        rows = [
            (
                row.name,
                si(row.macs),
                *(f"{row.times[way]:.3f}" if way in row.times else "" for way in ways),
                row.choice,
            )
            for row in self.decisions
        ]
        return ("block", ">MACs", *(f">{way}" for way in ways), "chosen"), rows


_ATTRIBUTE = "_lowrank"


@dataclass(frozen=True)
class Notes:
    """What is known of a module; fields that were not set have their defaults.

    - `name`: what the user calls a network that is not ours, `torchvision:resnet18` say.
    - `input_size`: (channels, height, width) of the images that the network takes.
    - `begun_from`: the file, run or data set that its trained weights come from; empty where it has none.
    - `training_card`: recipe, data and preprocessing of the run that trained it.
    - `int8_ranges`: the ranges of layers' inputs that training with `quantize="int8"` found.
    - `conversion`: the layers that `convert` or `decompose` rewrote, and why the others stayed.
    - `decomposition`: how well `decompose` fitted each layer.
    - `merging`: what `merge` folded, and why the rest stayed.
    - `plan`: what `plan` measured for each block, and what it chose.
    - `optimized`: whether `optimize` made the module.
    - `auxiliary`: names of the submodules that run in training alone.
    - `unpublished`: names of the submodules that the paper's parameter count leaves out.
    - `entries`: names of the layers that read the module's input in parallel branches.

    >>> import lowrank_cnn as lr
    >>> lr.notes(lr.create_model("nin")).input_size
    (3, 30, 30)
    """

    name: str = ""
    input_size: tuple[int, ...] | None = None
    begun_from: str = ""
    training_card: TrainingCard | None = None
    int8_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    conversion: Conversion | None = None
    decomposition: tuple[Fitted, ...] = ()
    merging: tuple[Merging, ...] = ()
    plan: NetworkPlan | None = None
    optimized: bool = False
    auxiliary: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()


def notes(module: nn.Module) -> Notes:
    """What is known of a module; of one that is not ours and was never worked on, nothing.

    >>> from torch import nn
    >>> conv = nn.Conv2d(3, 8, 3)
    >>> note(conv, input_size=(3, 32, 32))
    >>> notes(conv).input_size
    (3, 32, 32)
    """
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Notes) else Notes()


def note(module: nn.Module, **known: Any) -> None:
    """Write what is known of a module, by the fields of `Notes`; fields that are not given, or None, stay."""
    given = {name: value for name, value in known.items() if value is not None}
    module.__dict__[_ATTRIBUTE] = replace(notes(module), **given)


def forget(module: nn.Module, *fields: str) -> None:
    """Give fields their defaults back: what they say no longer holds of the module."""
    defaults = Notes()
    module.__dict__[_ATTRIBUTE] = replace(notes(module), **{name: getattr(defaults, name) for name in fields})
