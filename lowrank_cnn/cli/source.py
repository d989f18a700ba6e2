"""Where a command takes its network from: our own names, timm, torchvision, a file of the user's, a run."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lowrank_cnn.errors import LowRankError, nearest, require
from lowrank_cnn.models import create_model, list_models, list_pretrained

MODEL_HELP = (
    "A network's name (`lowrank models`), timm:NAME, torchvision:NAME, an exported .safetensors, a run's "
    "directory, or path.py:function, which runs that file of yours and calls the function."
)
INTO_HELP = "For weights of a network that is not ours: that network, unconverted, as path.py:function."

Size = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A network, and the size of the images it takes where that is known."""

    name: str
    network: nn.Module
    input_size: Size | None

    def size(self, asked: Size | None) -> Size:
        size = asked or self.input_size
        if size is None:
            raise LowRankError(f"{self.name} does not say what images it takes: give --input, like 3x224x224.")
        return size


def find_model(text: str, *, pretrained: bool = False, into: str | None = None, **options: Any) -> Source:
    """The network that a text names; the options are those of `create_model`, for our own networks.

    into: for the weights of a network that is not ours, the text that names that network, before any conversion.
    """
    given = {key: value for key, value in options.items() if value is not None}
    kind, colon, rest = text.partition(":")
    if not is_path(text):
        network = create_model(text, pretrained=_weights_of(text) if pretrained else None, **given)
        return Source(text, network, network.input_size)
    if given:
        raise LowRankError(f"{text} is taken as it is; {' and '.join(given)} can be set for our own networks.")
    makers: dict[str, Callable[[str, bool], Source]] = {"timm": _from_timm, "torchvision": _from_torchvision}
    if colon and kind in makers:
        return makers[kind](rest, pretrained)
    if pretrained:
        raise LowRankError(f"{text} is taken with the weights it has; --pretrained is for networks by name.")
    if colon and kind.endswith(".py"):
        return _from_file(Path(kind), rest)
    return _from_weights(Path(text), find_model(into).network if into else None)


def _weights_of(name: str) -> str:
    """The data set on which the package's own weights of a network were trained."""
    found = [data for known, data in list_pretrained() if known == name]
    if not found:
        known = ", ".join(dict.fromkeys(known for known, _ in list_pretrained()))
        raise LowRankError(f"there are no trained weights of {name}; there are those of {known}.")
    return found[0]


def _from_weights(path: Path, into: nn.Module | None) -> Source:
    """An exported network, or that of a run, for the images that it was trained on."""
    if path.is_dir() or path.with_suffix(".json").is_file():
        from lowrank_cnn.evaluation import load_checkpoint

        trained = load_checkpoint(path, network=into)
        return Source(path.name, trained.network.eval(), trained.input_size)
    if path.suffix != ".safetensors":
        raise LowRankError(
            f"{str(path)!r} names no network: write a network's name, path.py:function, timm:NAME, "
            "torchvision:NAME, a run's directory or an exported .safetensors."
        )
    from lowrank_cnn.deploy.export import load

    network = load(path, into=into)
    return Source(path.stem, network, getattr(network, "input_size", None))


def parse_size(text: str | None) -> Size | None:
    """An image size written CHANNELSxHEIGHTxWIDTH."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise LowRankError(f"an input size is written CHANNELSxHEIGHTxWIDTH, like 3x224x224, not {text!r}.")
    return tuple(map(int, match.groups()))


def is_path(text: str) -> bool:
    """Whether a text leads to a network elsewhere, in a file or another library, and is no plain name."""
    return ":" in text or bool(Path(text).suffix) or Path(text).exists()


def is_ours(text: str) -> bool:
    """Whether a text names one of our networks; a run's directory of that name comes first."""
    return text in list_models() and not Path(text).exists()


def _from_timm(name: str, pretrained: bool) -> Source:
    timm: Any = require("timm", extra="zoo", purpose=f"timm:{name}")
    known = timm.list_models()
    if name.partition(".")[0] not in known:  # behind the point stands which weights
        raise LowRankError(f"timm has no network {name!r}; {nearest(name, known)}")
    network = _called(lambda: timm.create_model(name, pretrained=pretrained), f"timm:{name}")
    config = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", {})
    size = config.get("input_size")
    return Source(f"timm:{name}", network, tuple(size) if size else None)


def _from_torchvision(name: str, pretrained: bool) -> Source:
    models: Any = require("torchvision.models", extra="zoo", purpose=f"torchvision:{name}")
    known = models.list_models()
    if name not in known:
        raise LowRankError(f"torchvision has no network {name!r}; {nearest(name, known)}")
    options = {"weights": "DEFAULT" if pretrained else None}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # else they are fetched although nobody asked for weights
    network = _called(lambda: models.get_model(name, **options), f"torchvision:{name}")
    return Source(f"torchvision:{name}", network, (3, 224, 224))


def _from_file(path: Path, function: str) -> Source:
    """Run the user's own file, as they asked, and call the function it defines."""
    if not path.is_file():
        raise LowRankError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _called(lambda: loader.exec_module(module), str(path))
    make = getattr(module, function, None)
    if not callable(make):
        raise LowRankError(f"{path} has no function {function!r}.")
    network = _called(make, f"{path}:{function}")
    if not isinstance(network, nn.Module):
        raise LowRankError(f"{path}:{function} is to give an nn.Module, but gives {network!r:.60}.")
    return Source(f"{path.name}:{function}", network, getattr(network, "input_size", None))


def _called(make: Callable[[], Any], what: str) -> Any:
    """What a function that is not ours gives, or its error in a sentence."""
    try:
        return make()
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise LowRankError(f"{what} does not run: {type(error).__name__}: {first}") from error
