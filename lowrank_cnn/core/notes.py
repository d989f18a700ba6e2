"""The library's notes about a module: one typed record, kept in one private attribute of that module.

A user's module may have children and attributes of any other name, such as `plan` or `input_size`. The record
survives `copy.deepcopy` and `torch.save`. It is no parameter, buffer or child, so tools do not see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


class AsDict:
    """A dataclass whose values JSON can hold."""

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True)
class TrainingCard:
    """A trained network's recipe and data as JSON, and its preprocessing as tensors."""

    card: Mapping[str, Any] = field(repr=False)
    preprocess: Mapping[str, Tensor] = field(repr=False)


_ATTRIBUTE = "_lowrank"


@dataclass(frozen=True)
class Notes:
    """Notes about a module; fields that were not set have their defaults.

    - `name`: the user's name for a network that is not ours, such as `torchvision:resnet18`.
    - `input_size`: (channels, height, width) of the images that the network takes.
    - `begun_from`: the file, run or data set that its trained weights come from; empty if it has none.
    - `training_card`: recipe, data and preprocessing of the run that trained it.
    - `int8_ranges`: the ranges of layers' inputs that training with `quantize="int8"` found.
    - `conversion`: the layers that `convert` or `decompose` rewrote, and why the others stayed (a `Conversion`).
    - `thinning`: the channels that `thin` left each layer (a `Thinning`).
    - `decomposition`: how well `decompose` fitted each layer (`Fitted`).
    - `merging`: what `merge` folded, and why the rest stayed (`Merging`).
    - `plan`: what `plan` measured for each block, and what it chose (a `NetworkPlan`).
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
    conversion: Any = None
    thinning: Any = None
    decomposition: tuple[Any, ...] = ()
    merging: tuple[Any, ...] = ()
    plan: Any = None
    optimized: bool = False
    auxiliary: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The fields that were set."""
        known = {name: value for name, value in vars(self).items() if value != getattr(Notes, name, {})}
        return f"Notes({', '.join(f'{name}={value!r}' for name, value in known.items())})"


def notes(module: nn.Module) -> Notes:
    """The notes about a module; empty for a module that the library never worked on.

    >>> from torch import nn
    >>> conv = nn.Conv2d(3, 8, 3)
    >>> note(conv, input_size=(3, 32, 32))
    >>> notes(conv).input_size
    (3, 32, 32)
    """
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Notes) else Notes()


def note(module: nn.Module, **known: Any) -> None:
    """Set fields of the notes about a module; fields that are not given, or None, stay."""
    given = {name: value for name, value in known.items() if value is not None}
    module.__dict__[_ATTRIBUTE] = replace(notes(module), **given)


def forget(module: nn.Module, *fields: str) -> None:
    """Reset fields to their defaults, because they no longer describe the module."""
    defaults = Notes()
    module.__dict__[_ATTRIBUTE] = replace(notes(module), **{name: getattr(defaults, name) for name in fields})
