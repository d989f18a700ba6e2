"""The families of networks, and building a network of one of them with fresh weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from lowrank_cnn.core import __version__
from lowrank_cnn.core.errors import LowRankError, check_choice, nearest, to_caller
from lowrank_cnn.core.modules import InputSize, checked_size
from lowrank_cnn.core.notes import notes
from lowrank_cnn.method.branches import fold_branches
from lowrank_cnn.method.convert import rows_of
from lowrank_cnn.method.count import LayerCount, count
from lowrank_cnn.method.init import INITIALISATIONS
from lowrank_cnn.method.rewrite import Change, changes_of, low_rank_layers, rewrite
from lowrank_cnn.method.schemes import Scheme, parse_scheme
from lowrank_cnn.method.thin import Thinning, thin_again
from lowrank_cnn.models import airbench, convnext, googlenet, nin, resnet, vgg
from lowrank_cnn.models.network import Network, Options

PAPER_FAMILIES = (vgg, googlenet, nin)
FAMILIES: dict[ModuleType, Callable[[Any, Options], Network]] = {
    vgg: vgg.VGG,
    googlenet: googlenet.GoogLeNet,
    nin: nin.NiN,
    resnet: resnet.ResNet,
    airbench: airbench.Airbench,
    convnext: convnext.ConvNeXt,
}


def list_models(*, paper: bool = False) -> list[str]:
    """The names that `create_model` takes, the paper's networks first; with `paper`, those alone.

    >>> list_models(paper=True)[-1]
    'nin-c3-lr'
    """
    families = PAPER_FAMILIES if paper else FAMILIES
    return [name for family in families for name in family.VARIANTS]


def family_of(name: str) -> ModuleType:
    """The module that builds a network."""
    if name not in (known := list_models()):
        other = to_caller(
            "build another library's and give it to lr.convert.", f"timm:{name}, torchvision:{name}?"
        )
        raise LowRankError(f"there is no network {name!r:.60}; {nearest(name, known)} Or {other}")
    return next(family for family in FAMILIES if name in family.VARIANTS)


def build_network(name: str, *, init: str = "composite", **given: Any) -> Network:
    """A network with fresh weights; the options are those of `create_model`."""
    check_choice("initialisation", init, INITIALISATIONS)
    family = family_of(name)
    if given.get("pool") is not None and family is not nin:
        raise LowRankError(f"pool is a choice of the nin networks; {name} has none: leave it out (pool=none).")
    variant = family.VARIANTS[name]
    own = {"num_classes": family.CLASSES, "norm": getattr(family, "NORM", None), "stride": variant.stride}
    chosen: Any = own | {key: value for key, value in given.items() if value is not None or key not in own}
    if chosen.get("scheme") is not None:
        chosen["scheme"] = str(parse_scheme(chosen["scheme"]))
    options = Options(**chosen)
    model: Network = INITIALISATIONS[init](FAMILIES[family](variant, options))  # type: ignore[assignment]
    model.adjust_init()
    model.config = {"name": name, **vars(options), "init": init}
    return model


# A description says in JSON how to build a network again. Nothing stored is run as code: it names one of our
# networks and its options, and lists the rewritten layers with their schemes. A network that is not ours is
# built by its owner, and rewritten as listed.


def rebuild_options(model: nn.Module) -> dict[str, Any]:
    """The options of one of our networks (None for another), and what was made thinner or rewritten in it."""
    thinning = notes(model).thinning
    return {
        "version": __version__,
        "model": dict(model.config) if isinstance(model, Network) else None,
        "class": type(model).__name__,
        "conversion": {"changed": [asdict(change) for change in changes_of(model)]},
        **({"thinning": thinning.to_dict()} if thinning else {}),
    }


def rebuild(description: Mapping[str, Any], *, into: nn.Module | None = None) -> nn.Module:
    """The network of a description, with fresh weights; one that is not ours is built on `into`.

    `into` is the network as it was before any conversion, which is left as it is, or the converted one itself.
    """
    if into is None:
        into = _ours(description)
    thinning, known = _thinning(description.get("thinning")), notes(into).thinning
    if thinning and (known is None or known.channels != thinning.channels):
        into = thin_again(into, thinning)
    schemes = _schemes(description.get("conversion", {}))
    done = {change.name: parse_scheme(change.scheme) for change in changes_of(into)}
    return into if schemes == done or not schemes else rewrite(into, schemes)


def with_classes(network: nn.Module, classes: int) -> nn.Module:
    """One of our networks for other classes: its last layer is new, all other weights are the same."""
    description = rebuild_options(network)
    ours = description["model"]
    fresh, other = (
        rebuild({**description, "model": ours and {**ours, "num_classes": number}})
        for number in (classes, 2 * classes)
    )
    new, resized = fresh.state_dict(), other.state_dict()
    # The last layer is what has another shape for another number of classes.
    kept = {name: known for name, known in network.state_dict().items() if new[name].shape == resized[name].shape}
    fresh.load_state_dict(new | kept)
    return fresh


def name_of(model: nn.Module) -> str:
    """A name for people: that of one of our networks, what the user called another, or its class."""
    return str(model.config["name"]) if isinstance(model, Network) else notes(model).name or type(model).__name__


def run_entry(model: nn.Module) -> dict[str, Any]:
    """The entry of a network in the record of a run: a name for people, and the values that `rebuild` needs."""
    found, name = rebuild_options(model), name_of(model)
    config, changed = found["model"], found["conversion"]["changed"]
    thinning = notes(model).thinning
    if not changed and not thinning:
        return config or {"name": name, "class": found["class"]}
    thin = [f"thin({thinning.share:.2g})"] if thinning else []
    schemes = dict.fromkeys(str(row["scheme"]).partition("(")[0] for row in changed)
    told = {"name": "+".join((name, *thin, *schemes)), "base": name, "config": config, "class": found["class"]}
    rows = [{"name": row["name"], "scheme": row["scheme"]} for row in changed]  # enough to repeat the conversion
    return told | {"conversion": {"changed": rows}, **({"thinning": thinning.to_dict()} if thinning else {})}


def entry_description(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The description that a `run_entry` holds."""
    if "conversion" in entry:
        known = {"model": entry.get("config"), "name": entry.get("base"), "class": entry.get("class")}
        return known | {key: entry[key] for key in ("conversion", "thinning") if key in entry}
    model, name = dict(entry) if "num_classes" in entry else None, entry.get("name")
    return {"model": model, "name": name, "class": entry.get("class", name), "conversion": {"changed": []}}


def _schemes(conversion: object) -> dict[str, Scheme]:
    rows: Any = conversion.get("changed") if isinstance(conversion, Mapping) else None
    if not isinstance(rows, Sequence) or not all(
        isinstance(row, Mapping) and {"name", "scheme"} <= row.keys() for row in rows
    ):
        raise LowRankError("a stored conversion lists the layers that it changed, each with its scheme.")
    return {str(row["name"]): parse_scheme(str(row["scheme"])) for row in rows}


def _thinning(stored: Any) -> Thinning | None:
    if stored is None:
        return None
    try:
        channels = {str(name): int(n) for name, n in stored["channels"].items()}
        size = None if stored["input_size"] is None else tuple(stored["input_size"])
        return Thinning(channels, size, *(int(stored[name]) for name in ("macs_before", "params_before", "macs")))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise LowRankError("a stored thinner network lists the channels of its layers.") from error


def _ours(description: Mapping[str, Any]) -> nn.Module:
    config = description.get("model")
    if not isinstance(config, Mapping):
        named = str(description.get("name"))
        function = named if ".py:" in named else "path.py:function"
        how = to_caller(
            "build the unconverted network and call lowrank_cnn.load(path, into=network).",
            f"name the function that builds it as --into {function}.",
        )
        raise LowRankError(f"{description.get('class') or 'the network'} is not one of our networks: {how}")
    try:
        return build_network(**config)
    except (TypeError, RuntimeError, OverflowError) as error:  # wrong types, or sizes that torch cannot hold
        name = str(config.get("name"))[:60]
        raise LowRankError(f"the stored options of {name} are not those of a network.") from error


_BASELINES = (
    "vgg11-gmp", "vgg11", "googlenet", "nin", "resnet18-small", "resnet18", "airbench", "convnext-small",
    "convnext",
)  # fmt: skip
"""Dense networks; where one's name begins with another's, the longer comes first."""


def baseline_of(name: str) -> str:
    """The dense network of a family, the first that a name begins with; any other name is its own."""
    return next((dense for dense in _BASELINES if name == dense or name.startswith(f"{dense}-")), name)


def dense_twin(model: nn.Module) -> Network | None:
    """The dense network to compare one of ours with, of the same width, norm, stride and classes.

    None for a network that is not ours, or that is its own twin.
    """
    if not isinstance(model, Network):
        return None
    config, name = model.config, str(model.config["name"])
    dense = baseline_of(name)
    rewritten = notes(model).conversion or notes(model).thinning
    if name == dense and config["scheme"] is None and not rewritten:
        return None
    return build_network(**{**config, "name": dense, "scheme": None})


def dense_cost(model: nn.Module, input_size: InputSize) -> tuple[int, int] | None:
    """Multiply-accumulates and parameters of a network before `convert` or `thin`; its own if it never was.

    For one of ours that is built with low-rank layers, those of its dense twin. None for other networks with
    low-rank layers that no recorded conversion made: the layers that they replaced are unknown.
    """
    changed, thinning = changes_of(model), notes(model).thinning
    if thinning and thinning.input_size == checked_size(input_size):
        return thinning.macs_before, thinning.params_before
    if thinning or low_rank_layers(model).keys() - {change.name for change in changed}:
        with torch.device("meta"):
            twin = dense_twin(model)
            return None if twin is None else (count(twin, input_size).macs, count(twin, input_size).params)
    model = fold_branches(model)  # as it is counted
    cost = count(model, input_size)
    macs, params = cost.macs, cost.params
    for change in changed:
        layer = model.get_submodule(change.name)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):  # narrower than before, and without MACs
            params += change.params_before - change.params_after
            continue
        rows = rows_of(cost.layers, change.name)
        if not rows:  # it does not run on the way to the output
            return None
        macs += _macs_before(model, change, rows) - sum(row.macs for row in rows)
        params += change.params_before - sum(row.params for row in rows)
    return macs, params


def _macs_before(model: nn.Module, change: Change, rows: Sequence[LayerCount]) -> int:
    """The MACs of a layer before it was replaced, by the pixels that its replacement works on."""
    # The last stage has the pixels of a conv's output, the first those of the input, for a transposed conv.
    transposed = isinstance(model.get_submodule(rows[0].name), _ConvTransposeNd)
    worked = rows[0] if transposed else rows[-1]
    pixels = worked.macs // (worked.params - _biases(model, worked))
    # Folding branches or a norm adds a bias, so the last stage cannot tell whether the layer had one. A filter of
    # several taps can: without a bias, its number of parameters is a multiple of its taps.
    kernel, _, filters = change.before.rpartition(",")
    taps = prod(map(int, kernel.split("x"))) if kernel.replace("x", "").isdecimal() else 1
    has_bias = change.params_before // int(filters) % taps if taps > 1 else _biases(model, rows[-1])
    return pixels * (change.params_before - (int(filters) if has_bias else 0))


def _biases(model: nn.Module, row: LayerCount) -> int:
    return sum(p.numel() for p in model.get_submodule(row.name).parameters() if p.dim() == 1)
