"""Networks that are not ours: of timm, of torchvision, and of a function in the user's own file."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from torch import nn

from lowrank_cnn.core.errors import LowRankError, check_file, first_line, nearest, require
from lowrank_cnn.core.notes import note, notes

DEFAULT = "default"
"""The trained weights that timm and torchvision choose themselves."""
Built = tuple[nn.Module, tuple[int, ...] | None]


def is_foreign(text: str) -> bool:
    """Whether a text is timm:NAME, torchvision:NAME or path.py:function."""
    kind, _, rest = text.partition(":")
    return bool(rest) and (kind in ("timm", "torchvision") or kind.endswith(".py"))


def build_foreign(text: str, pretrained: str | None = None, num_classes: int | None = None) -> Built:
    """The network that such a text names, and the size of its images if that is known.

    `pretrained` are weights by name, or "default". With `num_classes` the last layer is new, and the others keep
    those weights; a function of the user's gets it if it takes a parameter of that name.
    """
    kind, _, name = text.partition(":")
    if kind in ("timm", "torchvision"):
        library: Any = require("timm" if kind == "timm" else "torchvision.models", extra="zoo", purpose=text)
        base = name.partition(".")[0] if kind == "timm" else name  # the part behind the point names the weights
        if base not in (known := library.list_models()):
            raise LowRankError(f"{kind} has no network {name!r}; {nearest(name, known)}")
        build = _from_timm if kind == "timm" else _from_torchvision
        network, size = build(library, name, pretrained, num_classes)
        note(network, name=text)
        return network, size
    make = function_of(Path(kind), name)
    takes = inspect.signature(make).parameters
    options = {"num_classes": num_classes} if num_classes is not None and "num_classes" in takes else {}
    network = called(lambda: make(**options), text)
    if not isinstance(network, nn.Module):
        raise LowRankError(f"{text} is to give an nn.Module, but gives {network!r:.60}.")
    note(network, name=f"{Path(kind).name}:{name}")
    return network, notes(network).input_size


def function_of(path: Path, function: str) -> Callable[..., Any]:
    """Run the user's own file as `python FILE` would, with imports of its neighbours, for one of its functions."""
    check_file(path)
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    name = f"file_of_the_user_{path.stem}"
    spec: Any = spec_from_file_location(name, path)
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look for the types they name there
    called(lambda: spec.loader.exec_module(module), str(path))
    make = getattr(module, function, None)
    if not callable(make):
        raise LowRankError(f"{path} has no function {function!r}.")
    return make


def called(make: Callable[[], Any], what: str) -> Any:
    """Call a function of another package or of the user; an error becomes a sentence."""
    try:
        return make()
    except Exception as error:
        raise LowRankError(f"{what} does not run: {type(error).__name__}: {first_line(error)}") from error


def copy_equal_shapes(trained: nn.Module, network: nn.Module) -> list[str]:
    """Give a network all tensors of a trained one that have its names and shapes; the names of the others."""
    theirs, own = trained.state_dict(), network.state_dict()
    kept = {name: tensor for name, tensor in theirs.items() if name in own and own[name].shape == tensor.shape}
    network.load_state_dict(kept, strict=False)
    return sorted(own.keys() - kept.keys())


def _from_timm(timm: Any, name: str, pretrained: str | None, num_classes: int | None) -> Built:
    chosen = f"{name}.{pretrained}" if pretrained not in (None, DEFAULT) else name
    # With another number of classes, timm keeps the trained weights of all layers but the last.
    options: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    make = partial(timm.create_model, chosen, pretrained=pretrained is not None, **options)
    network = called(make, f"timm:{chosen}")
    config = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", {})
    return network, tuple(config.get("input_size") or ()) or None


def _from_torchvision(models: Any, name: str, pretrained: str | None, num_classes: int | None) -> Built:
    options: dict[str, Any] = {}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # else they are downloaded although nobody asked for weights
    weights = pretrained.upper() if pretrained == DEFAULT else pretrained

    def build(**more: Any) -> nn.Module:
        return called(lambda: models.get_model(name, **more, **options), f"torchvision:{name}")

    network = build(weights=weights) if num_classes is None else build(weights=None, num_classes=num_classes)
    if num_classes is not None and weights:  # torchvision gives weights to networks of 1000 outputs alone
        copy_equal_shapes(build(weights=weights), network)
    return network, (3, 224, 224)
