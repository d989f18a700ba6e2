"""Find the network that a command names: one of ours, timm, torchvision, the user's own file, a run."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError, first_line, nearest, require
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.core.text import counted
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.schemes import parse_scheme
from lowrank_cnn.models import create_model, list_models

if TYPE_CHECKING:
    from lowrank_cnn.data import Data
    from lowrank_cnn.train.trained import Trained

# Run the user's own file for a network or for example inputs.


def find_example(text: str, *, option: str = "--example") -> Any:
    """The inputs that a function of the user's file gives: a tensor, a tuple, or a dictionary of keywords."""
    path, colon, function = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise LowRankError(f"{option} names a function that gives the inputs, as path.py:function, not {text!r}.")
    return called(function_of(Path(path), function), text)


def function_of(path: Path, function: str) -> Callable[..., Any]:
    """Run the user's own file as `python FILE` would, with imports of its neighbours, for one of its functions."""
    if not path.is_file():
        raise LowRankError(f"there is no file {path}.")
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"file_of_the_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[module.__name__] = module  # where dataclasses look for the types they name
    called(lambda: loader.exec_module(module), str(path))
    make = getattr(module, function, None)
    if not callable(make):
        raise LowRankError(f"{path} has no function {function!r}.")
    return make


def called(make: Callable[[], Any], what: str) -> Any:
    """What a function that is not ours gives, or its error in a sentence."""
    try:
        return make()
    except Exception as error:
        raise LowRankError(f"{what} does not run: {type(error).__name__}: {first_line(error)}") from error


DEFAULT = "default"
"""The trained weights that timm and torchvision choose themselves."""

_NAMED = ("timm:", "torchvision:")
Size = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A network, and the size of the images it takes where that is known.

    `trained` has its classes and the preparation of its images, where it comes from a run or is the package's own;
    `dense` is the network before it was converted; `remark` is what the user should know of its weights.
    """

    name: str
    network: nn.Module
    input_size: Size | None
    trained: Trained | None = None
    dense: nn.Module | None = None
    remark: str = ""

    def size(self, asked: Size | None) -> Size:
        check_axes(asked, self.input_size or asked or ())
        size = asked or self.input_size
        if size is None:
            raise LowRankError(f"{self.name} does not say what images it takes: give --input, like 3x224x224.")
        return size

    def converted(self, scheme: str) -> Source:
        """The network with its convs rewritten, their weights fresh."""
        fresh = (
            f"Layers that {scheme} rewrites begin with fresh weights: `lowrank decompose` keeps the trained ones."
        )
        remark = f"{self.remark} {fresh}" if self.remark else ""
        return replace(
            self, network=convert(self.network, scheme), trained=None, dense=self.network, remark=remark
        )


def find_model(
    text: str,
    *,
    pretrained: str | None = None,
    into: str | None = None,
    scheme: str | None = None,
    classes: Sequence[str] | None = None,
    **options: Any,
) -> Source:
    """The network that a text names; the options are those of `create_model`, for our own networks.

    pretrained: which trained weights a network by name gets.
    into: for the weights of a network that is not ours, the text that names that network, before any conversion.
    scheme: one of our networks is built by it, any other is converted.
    classes: the names of the classes that a network which is not built by name is to tell apart.
    """
    if not is_path(text):
        return _ours(text, pretrained, _given({"scheme": scheme, **options}))
    source = _others(text, pretrained, into, _given(options), classes)
    if text.startswith(_NAMED) or text.partition(":")[0].endswith(".py"):
        note(source.network, name=source.name)
    return source.converted(scheme) if scheme else source


def check_model(text: str, *, scheme: str | None = None, **options: Any) -> None:
    """Refuse a wrong name, option or scheme before any image is read, without computing anything."""
    if not is_path(text):
        with torch.device("cpu" if options.get("pretrained") else "meta"):
            find_model(text, scheme=scheme, **options)
        return
    given = _given({key: value for key, value in options.items() if key != "pretrained"})
    if given:
        raise LowRankError(f"{text} is taken as it is; {' and '.join(given)} can be set for our own networks.")
    if scheme is not None:
        parse_scheme(scheme)
    kind, colon, _ = text.partition(":")
    if colon and kind.endswith(".py") and not Path(kind).is_file():
        raise LowRankError(f"there is no file {kind}.")


def build_for(data: Data, text: str, *, into: str | None = None, **options: Any) -> Source:
    """The network that a text names, for the classes of the data, and one of ours for its channels too."""
    if is_path(text):
        return find_model(text, into=into, classes=data.classes, **options)
    shape = {"num_classes": len(data.classes), "in_channels": data.test.channels}
    network = create_model(text, **shape, **_given(options))
    source = Source(text, network, network.input_size)
    if not (pretrained := options.get("pretrained")):
        return source
    from lowrank_cnn.train.trained import load_pretrained

    renewed = _for_classes(replace(source, trained=load_pretrained(text, pretrained)), data.classes)
    note(renewed.network, begun_from=notes(network).begun_from)
    return replace(renewed, trained=None)


def find_into(into: str | None, trained: str | Path) -> nn.Module | None:
    """The network that the weights of a run or a file are loaded into, with as many outputs as these have."""
    if into is None:
        return None
    from lowrank_cnn.train.trained import classes_of

    return find_model(into, classes=classes_of(trained)).network


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _ours(name: str, pretrained: str | None, options: dict[str, Any]) -> Source:
    network = create_model(name, pretrained=pretrained, **options)  # which refuses what the weights are not for
    if not pretrained:
        return Source(name, network, network.input_size)
    from lowrank_cnn.train.trained import load_pretrained

    return Source(name, network, network.input_size, replace(load_pretrained(name, pretrained), network=network))


def _others(
    text: str, pretrained: str | None, into: str | None, given: dict[str, Any], classes: Sequence[str] | None
) -> Source:
    """A network that is not built by name, as it is."""
    kind, colon, rest = text.partition(":")
    if given:
        raise LowRankError(f"{text} is taken as it is; {' and '.join(given)} can be set for our own networks.")
    makers: dict[str, Callable[[str, str | None, Sequence[str] | None], Source]] = {
        "timm": _from_timm,
        "torchvision": _from_torchvision,
    }
    if colon and kind in makers:
        return makers[kind](rest, pretrained, classes)
    if pretrained:
        raise LowRankError(f"{text} is taken with the weights it has; --pretrained is for networks by name.")
    if colon and kind.endswith(".py"):
        return _from_file(Path(kind), rest, classes)
    source = _for_classes(_from_weights(Path(text), find_into(into, text)), classes)
    # Built anew: what was passed in holds the weights now, and is what it was converted to.
    if into and notes(source.network).conversion:
        dense = find_into(into, text)
        assert dense is not None
        return replace(source, dense=dense.eval())
    return source


def _from_weights(path: Path, into: nn.Module | None) -> Source:
    """An exported network, or that of a run, for the images that it was trained on."""
    from lowrank_cnn.models.hub import WEIGHTS, resolve
    from lowrank_cnn.models.network_file import read_weights
    from lowrank_cnn.train.trained import load_checkpoint, trained_of

    name, path = (path.name if path.is_dir() else str(path)), resolve(path)
    if path.is_dir() or path.with_suffix(".json").is_file():
        trained = load_checkpoint(path, network=into)
        return Source(path.name, trained.network.eval(), trained.input_size, trained)
    if path.suffix != ".safetensors":
        raise LowRankError(
            f"{str(path)!r} names no network: write a network's name, path.py:function, timm:NAME, "
            "torchvision:NAME, hf-hub:USER/NAME, a run's directory or an exported .safetensors."
        )
    if not path.is_file():
        raise LowRankError(f"there is no file {path}.")
    stored = read_weights(path, into=into)
    size = stored.input_size or notes(stored.network).input_size
    label = name if path.name == WEIGHTS else path.stem
    return Source(label, stored.network.eval(), size, trained_of(stored))


def _for_classes(source: Source, classes: Sequence[str] | None) -> Source:
    """A trained network of ours for other classes than it was trained on: with a new last layer."""
    if classes is None or source.trained is None or tuple(classes) == source.trained.classes:
        return source
    from lowrank_cnn.models.build import with_classes
    from lowrank_cnn.models.network import Network

    if not isinstance(source.network, Network):
        return source  # `fit` says which number of outputs it needs
    fresh = replace(source, network=with_classes(source.network, len(classes)), trained=None)
    return _with_new_head(fresh, "trained", classes)


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


def check_axes(asked: Size | None, known: Size) -> None:
    """Refuse a size of other axes than a network is known to take: 224x224 for 3x224x224."""
    if asked is not None and len(asked) != len(known):
        raise _not_a_size("x".join(map(str, asked)))


def _not_a_size(text: str) -> LowRankError:
    return LowRankError(f"an input size is written CHANNELSxHEIGHTxWIDTH, like 3x224x224, not {text!r}.")


def is_path(text: str) -> bool:
    """Whether a text names a network in a file, in another library or on the Hub, and is no plain name."""
    return ":" in text or bool(Path(text).suffix) or Path(text).exists()


def is_weights(text: str) -> bool:
    """Whether a text names trained weights of ours: a run, a file or a repository on the Hub."""
    return text.startswith("hf-hub:") or Path(text).exists()


def is_ours(text: str) -> bool:
    """Whether a text names one of our networks; a run's directory of that name comes first."""
    return text in list_models() and not Path(text).exists()


def _from_timm(name: str, pretrained: str | None, classes: Sequence[str] | None) -> Source:
    timm: Any = require("timm", extra="zoo", purpose=f"timm:{name}")
    known = timm.list_models()
    if name.partition(".")[0] not in known:  # behind the point stands which weights
        raise LowRankError(f"timm has no network {name!r}; {nearest(name, known)}")
    chosen = f"{name}.{pretrained}" if pretrained not in (None, DEFAULT) else name
    # With another number of classes, timm keeps the trained weights of all layers but the last.
    options = {} if classes is None else {"num_classes": len(classes)}
    network = called(
        lambda: timm.create_model(chosen, pretrained=pretrained is not None, **options), f"timm:{chosen}"
    )
    config = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", {})
    size = config.get("input_size")
    source = Source(f"timm:{name}", network, tuple(size) if size else None)
    return _with_new_head(source, pretrained, classes)


def _from_torchvision(name: str, pretrained: str | None, classes: Sequence[str] | None) -> Source:
    models: Any = require("torchvision.models", extra="zoo", purpose=f"torchvision:{name}")
    known = models.list_models()
    if name not in known:
        raise LowRankError(f"torchvision has no network {name!r}; {nearest(name, known)}")
    options: dict[str, Any] = {}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # else they are fetched although nobody asked for weights
    weights = pretrained.upper() if pretrained == DEFAULT else pretrained

    def build(**more: Any) -> nn.Module:
        return called(lambda: models.get_model(name, **more, **options), f"torchvision:{name}")

    if classes is None:
        return Source(f"torchvision:{name}", build(weights=weights), (3, 224, 224))
    network = build(weights=None, num_classes=len(classes))
    if weights:  # torchvision gives weights to networks of 1000 outputs alone
        copy_equal_shapes(build(weights=weights), network)
    return _with_new_head(Source(f"torchvision:{name}", network, (3, 224, 224)), pretrained, classes)


def copy_equal_shapes(trained: nn.Module, network: nn.Module) -> list[str]:
    """Give a network all tensors of a trained one that have its names and shapes; the names of the others."""
    theirs, own = trained.state_dict(), network.state_dict()
    kept = {name: tensor for name, tensor in theirs.items() if name in own and own[name].shape == tensor.shape}
    network.load_state_dict(kept, strict=False)
    return sorted(own.keys() - kept.keys())


def _with_new_head(source: Source, pretrained: str | None, classes: Sequence[str] | None) -> Source:
    if classes is None or pretrained is None:
        return source
    note(source.network, begun_from=f"{source.name}, {pretrained}")
    number = counted(len(classes), "class")
    return replace(source, remark=f"The last layer is new, for {number}; the others begin with trained weights.")


def _from_file(path: Path, function: str, classes: Sequence[str] | None) -> Source:
    """Call a function of the user's file, with `num_classes` if it takes that, for its network."""
    make = function_of(path, function)
    takes = inspect.signature(make).parameters
    options = {"num_classes": len(classes)} if classes is not None and "num_classes" in takes else {}
    network = called(lambda: make(**options), f"{path}:{function}")
    if not isinstance(network, nn.Module):
        raise LowRankError(f"{path}:{function} is to give an nn.Module, but gives {network!r:.60}.")
    return Source(f"{path.name}:{function}", network, notes(network).input_size)
