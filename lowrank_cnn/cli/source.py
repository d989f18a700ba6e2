"""Find the network that a command names: one of ours, timm, torchvision, the user's own file, a run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.cli.show import errors
from lowrank_cnn.core.compare import mapped
from lowrank_cnn.core.errors import LowRankError, check_file
from lowrank_cnn.core.files import read_json, write_json
from lowrank_cnn.core.modules import InputSize, is_example
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.core.text import counted
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.prune import cheaper
from lowrank_cnn.models import create_model
from lowrank_cnn.models.build import dense_twin, rebuild, rebuild_options, with_classes
from lowrank_cnn.models.foreign import build_foreign, called, copy_equal_shapes, function_of, is_foreign
from lowrank_cnn.models.hub import WEIGHTS, resolve
from lowrank_cnn.models.network import Network
from lowrank_cnn.models.network_file import dtype_of, read_weights

if TYPE_CHECKING:
    from lowrank_cnn.train.trained import Trained

Size = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A network with its name, and the size of the images it takes where that is known."""

    name: str
    network: nn.Module
    input_size: Size | None
    trained: Trained | None = None
    """Its classes and preprocessing, if it comes from a run or from the package."""
    dense: nn.Module | None = None
    """The network before it was converted."""
    remark: str = ""
    """A sentence for the user about its weights."""

    def twin(self) -> nn.Module | None:
        """The dense network to compare it with: as it was before conversion, or the dense one of ours."""
        return self.dense or dense_twin(self.network)

    def size(self, asked: Size | None) -> Size:
        """The size of its images: as asked, or as it is known."""
        known = self.input_size or asked
        if known is None:
            raise LowRankError(f"{self.name} needs the size of its images: give --input, like 3x224x224.")
        if asked and len(asked) != len(known):
            raise _not_a_size("x".join(map(str, asked)))
        return asked or known

    def images(self, data: str, size: Size, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Training images with their labels, preprocessed as in training, or standardised."""
        from lowrank_cnn.data import Augment, fit_preprocess, make_loader, open_data

        asked = (self.trained.size_option if self.trained else None) or size[1]
        found = open_data(data, limit=count, image_size=asked, channels=size[0], progress=False)
        preprocess = self.trained.preprocess if self.trained else fit_preprocess("standardize", found.train)
        how: dict[str, Any] = {"augment": self.trained.augment if self.trained else Augment(), "train": False}
        loader = make_loader(found.train, preprocess=preprocess, batch_size=count, seed=0, device="cpu", **how)
        return next(iter(loader.epoch(0)))

    def export(self, network: nn.Module, path: Path, inputs: Any, **options: Any) -> Any:
        """Write a network made from this one, for a size or an example, with the classes if they are known."""
        model = network if self.trained is None else replace(self.trained, network=network)
        kind = "example_input" if is_example(inputs) else "input_size"
        return lr.export(model, path, **{kind: inputs} | options)

    def converted(self, scheme: str) -> Source:
        """The network with its convs rewritten, their weights fresh."""
        return replace(self, network=convert(self.network, scheme), trained=None, dense=self.network)

    def cheaper(self, scheme: str | None, macs: float | None, size: InputSize, *, pretrained: bool) -> Source:
        """The network with low-rank filters, or thinner; its trained weights are decomposed or pruned."""
        new = cheaper(self.network, scheme=scheme, macs=macs, input_size=size, pretrained=pretrained)
        told = f"Layers that {scheme} rewrites begin with fresh weights: separable and lr-join keep trained ones."
        if scheme is None:
            told = "It is made thinner: the channels of the largest weights stay."
        elif notes(new).decomposition:
            told = "Low-rank filters begin as those that are nearest to the trained ones."
        remark = f"{self.remark} {told}".strip() if pretrained else ""
        return replace(self, network=new, trained=None, dense=self.network, remark=remark)


def find_model(
    text: str,
    *,
    pretrained: str | None = None,
    into: str | None = None,
    scheme: str | None = None,
    classes: Sequence[str] | None = None,
    channels: int | None = None,
    **options: Any,
) -> Source:
    """The network that a text names; the options are those of `create_model`, for our own networks.

    `into` names the network before conversion that weights of a network not ours are loaded into. `classes` and
    `channels` are those of the images to train on.
    """
    number = None if classes is None else len(classes)
    if not is_path(text):
        given = _given({"num_classes": number, "in_channels": channels, "scheme": scheme})
        # `create_model` refuses options that the weights are not for.
        network = create_model(text, pretrained=pretrained, **given, **_given(options))
        source = Source(text, network, network.input_size)
        if not pretrained:
            return source
        trained = replace(lr.load_pretrained(text, pretrained), network=network)
        renewed = _for_classes(replace(source, trained=trained), classes)
        note(renewed.network, begun_from=notes(network).begun_from)
        return renewed
    _refuse_options(text, options)
    if pretrained and (not is_foreign(text) or ".py:" in text):
        told = "--pretrained is for networks by name. To begin with trained weights, name their run instead"
        raise LowRankError(f"{text} is taken with the weights it has; {told}.")
    if is_foreign(text):
        network, size = build_foreign(text, pretrained, number)
        source = _with_new_head(Source(notes(network).name, network, size), pretrained, classes)
    else:
        source = _from_weights(text, into, classes)
    return source.converted(scheme) if scheme else source


def check_model(text: str, *, scheme: str | None = None, pretrained: str | None = None, **options: Any) -> None:
    """Refuse a wrong name or option before any image is read, without computing anything."""
    if not is_path(text):
        with torch.device("cpu" if pretrained else "meta"):
            find_model(text, scheme=scheme, pretrained=pretrained, **options)
        return
    _refuse_options(text, options)
    if ".py:" in text:
        check_file(Path(text.partition(":")[0]))


def find_into(into: str | None, trained: str | Path) -> nn.Module | None:
    """The network that the weights of a run or a file are loaded into, with as many outputs as these have.

    It is named by --into; without it, by what was named for this run before.
    """
    from lowrank_cnn.train.trained import classes_of, is_own

    if into is not None:
        remember(into, Path(trained))
    elif (into := remembered(trained) if is_own(trained) else None) is None:
        return None
    else:
        _print_once(f"Network: --into {into}, as before.")
    return find_model(into, classes=classes_of(trained)).network


_print_once = cache(errors.print)  # a network is built again as its own dense twin


# The networks of the user's own runs, by the place of the run. A run or a cache may come from somebody else, and
# must never name code that is run. The notes are therefore in the home of this user, who named that file, and they
# hold only while the file is as it was.


def _notebook() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "lowrank-cnn" / "networks.json"


def remember(into: str, *runs: Path) -> None:
    """Note the network that the weights of runs go into."""
    with contextlib.suppress(OSError, LowRankError):  # then --into is needed again
        kept = {place: known for place, known in _noted().items() if Path(place).exists()}
        write_json(_notebook(), kept | {str(run.resolve()): _entry(into) for run in runs})


def remembered(run: str | Path) -> str | None:
    """The network noted for a run; None if there is none, or its file has changed."""
    entry = str(_noted().get(str(Path(run).resolve()), ""))
    into = entry.rpartition("#")[0]
    return into if into and _entry(into) == entry else None


def _entry(into: str) -> str:
    """A network by the absolute path of its file, and that file's digest."""
    file, _, function = into.partition(":")
    path = Path(file).resolve()
    if not file.endswith(".py") or not path.is_file():
        return f"{into}#"
    return f"{path}:{function}#{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _noted() -> dict[str, Any]:
    """The notes; none if another user may have written them."""
    try:
        about = _notebook().stat()
        ours = about.st_uid == os.getuid() and not about.st_mode & stat.S_IWOTH
        return dict(read_json(_notebook())) if ours else {}
    except (OSError, ValueError, TypeError, AttributeError):  # missing, damaged; a system without users
        return {}


def find_example(text: str, *, option: str = "--example") -> Any:
    """The inputs that a function of the user's file gives: a tensor, a tuple, or a dictionary of keywords."""
    path, colon, function = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise LowRankError(f"{option} names a function that gives the inputs, as path.py:function, not {text!r}.")
    return called(function_of(Path(path), function), text)


def placed(network: nn.Module, given: Any, batch: int, device: str) -> tuple[str, nn.Module, Any]:
    """The device, the network on it, and its inputs there: an example, or random images where a size is given."""
    from lowrank_cnn.train.distributed import resolve_device

    place = resolve_device(device)
    network = network.eval().to(place)
    if is_example(given):
        return place, network, mapped(lambda value: value.to(place) if hasattr(value, "to") else value, given)
    return place, network, torch.randn(batch, *given).to(place, dtype_of(network))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _refuse_options(text: str, options: dict[str, Any]) -> None:
    if given := _given(options):
        raise LowRankError(f"{text} is taken as it is; {' and '.join(given)} can be set for our own networks.")


def _from_weights(text: str, into: str | None, classes: Sequence[str] | None) -> Source:
    """An exported network, or that of a run, for the images that it was trained on."""
    from lowrank_cnn.train.trained import load_checkpoint, trained_of

    path, network = resolve(Path(text)), find_into(into, text)
    if path.is_dir() or path.with_suffix(".json").is_file():
        trained = load_checkpoint(path, network=network)
        source = Source(path.name, trained.network.eval(), trained.input_size, trained)
    elif path.suffix != ".safetensors":
        raise LowRankError(
            f"{str(path)!r} names no network: write a network's name, path.py:function, timm:NAME, "
            "torchvision:NAME, hf-hub:USER/NAME, a run's directory or an exported .safetensors."
        )
    else:
        check_file(path)
        stored = read_weights(path, into=network)
        name = (Path(text).name if Path(text).is_dir() else text) if path.name == WEIGHTS else path.stem
        size = stored.input_size or notes(stored.network).input_size
        source = Source(name, stored.network.eval(), size, trained_of(stored))
    source = _for_classes(source, classes, into)
    # Build it anew: loading has converted the first one and filled it with weights.
    dense = find_into(into, text) if notes(source.network).conversion else None
    return source if dense is None else replace(source, dense=dense.eval())


def _for_classes(source: Source, classes: Sequence[str] | None, into: str | None = None) -> Source:
    """A trained network for other classes than it was trained on: with a new last layer."""
    if classes is None or source.trained is None or tuple(classes) == source.trained.classes:
        return source
    if isinstance(source.network, Network):
        network = with_classes(source.network, len(classes))
    elif into is None:
        return source  # `fit` says which number of outputs it needs
    else:
        network = rebuild(rebuild_options(source.network), into=find_model(into, classes=classes).network)
        if not copy_equal_shapes(source.network, network):  # it is built for the same number of classes
            return source
    return _with_new_head(replace(source, network=network, trained=None), "trained", classes)


def parse_size(text: str | None) -> Size | None:
    """An image size written CHANNELSxHEIGHTxWIDTH; series and volumes have fewer and more axes.

    >>> parse_size("1x16000")
    (1, 16000)
    """
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,3}", text):
        raise _not_a_size(text)
    return tuple(map(int, text.split("x")))


def _not_a_size(text: str) -> LowRankError:
    return LowRankError(f"an input size is written CHANNELSxHEIGHTxWIDTH, like 3x224x224, not {text!r}.")


def is_path(text: str) -> bool:
    """Whether a text names a network in a file, in another library or on the Hub, and is no plain name."""
    return ":" in text or bool(Path(text).suffix) or Path(text).exists()


def is_weights(text: str) -> bool:
    """Whether a text names trained weights of ours: a run, a file or a repository on the Hub."""
    return text.startswith("hf-hub:") or Path(text).exists()


def _with_new_head(source: Source, pretrained: str | None, classes: Sequence[str] | None) -> Source:
    if classes is None or pretrained is None:
        return source
    note(source.network, begun_from=f"{source.name}, {pretrained}")
    number = counted(len(classes), "class")
    return replace(source, remark=f"The last layer is new, for {number}; the others begin with trained weights.")
