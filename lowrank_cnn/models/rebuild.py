"""Describe how to build a network again, including its conversions, in JSON values.

Nothing stored is run as code: a description names one of our networks and its options, and lists which layers were
rewritten by which scheme. A network that is not ours is built by its owner, and rewritten as listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from lowrank_cnn.method.rewriting import changes_of, rewrite
from lowrank_cnn.method.scheme import Scheme, parse_scheme
from lowrank_cnn.models.families import build_network
from lowrank_cnn.models.network import Network
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import notes
from lowrank_cnn.system.version import __version__


def rebuild_options(model: nn.Module) -> dict[str, Any]:
    """The options of one of our networks (None for another), and what was rewritten in it."""
    return {
        "version": __version__,
        "model": dict(model.config) if isinstance(model, Network) else None,
        "class": type(model).__name__,
        "conversion": {"changed": [asdict(change) for change in changes_of(model)]},
    }


def rebuild(description: Mapping[str, Any], *, into: nn.Module | None = None) -> nn.Module:
    """The network of a description, with fresh weights; one that is not ours is built on `into`.

    `into` is the network as it was before any conversion, which is left as it is, or the converted one itself.
    """
    if into is None:
        into = _ours(description)
    conversion = description.get("conversion", {})
    schemes = _schemes(conversion)
    done = {change.name: parse_scheme(change.scheme) for change in changes_of(into)}
    return into if schemes == done else rewrite_again(into, conversion)


def with_classes(network: nn.Module, classes: int) -> nn.Module:
    """One of our networks for other classes: its last layer is new, all other weights are the same.

    >>> with_classes(build_network("nin", num_classes=100, width=0.1), 2).config["num_classes"]
    2
    """
    fresh, other = (_built_for(network, number) for number in (classes, 2 * classes))
    new, resized = fresh.state_dict(), other.state_dict()
    # The last layer is what has another shape for another number of classes.
    kept = {name: known for name, known in network.state_dict().items() if new[name].shape == resized[name].shape}
    fresh.load_state_dict(new | kept)
    return fresh


def _built_for(network: nn.Module, classes: int) -> nn.Module:
    """One of our networks built again, with fresh weights."""
    description = rebuild_options(network)
    if isinstance(config := description["model"], dict):
        config["num_classes"] = classes
    return rebuild(description)


def rewrite_again(model: nn.Module, conversion: Mapping[str, object]) -> nn.Module:
    """Repeat a stored conversion (`Conversion.to_dict()`) on the network it was made from, with fresh weights."""
    schemes = _schemes(conversion)
    return rewrite(model, schemes) if schemes else model


def name_of(model: nn.Module) -> str:
    """A name for people: that of one of our networks, what the user called another, or its class.

    >>> name_of(build_network("nin")), name_of(nn.Sequential())
    ('nin', 'Sequential')
    """
    return str(model.config["name"]) if isinstance(model, Network) else notes(model).name or type(model).__name__


def run_entry(model: nn.Module) -> dict[str, Any]:
    """What the record of a run says about its network: a name for people, and what `rebuild` needs."""
    found, name = rebuild_options(model), name_of(model)
    config, changed = found["model"], found["conversion"]["changed"]
    if not changed:
        return config or {"name": name, "class": found["class"]}
    schemes = dict.fromkeys(str(row["scheme"]).partition("(")[0] for row in changed)
    told = {"name": "+".join((name, *schemes)), "base": name, "config": config, "class": found["class"]}
    return told | _only(found)


def entry_description(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The description that a `run_entry` holds."""
    if "conversion" in entry:
        known = {"model": entry.get("config"), "name": entry.get("base"), "class": entry.get("class")}
        return known | {"conversion": entry["conversion"]}
    ours = "num_classes" in entry
    return {
        "model": dict(entry) if ours else None,
        "name": entry.get("name"),
        "class": entry.get("class", entry.get("name")),
        "conversion": {"changed": []},
    }


def _only(found: Mapping[str, Any]) -> dict[str, Any]:
    """The part of each change that repeats it; the rest is for reports."""
    rows = [{"name": row["name"], "scheme": row["scheme"]} for row in found["conversion"]["changed"]]
    return {"conversion": {"changed": rows}}


def _schemes(conversion: object) -> dict[str, Scheme]:
    changed = conversion.get("changed") if isinstance(conversion, Mapping) else None
    if not isinstance(changed, Sequence) or not all(_is_change(row) for row in changed):
        raise LowRankError("a stored conversion lists the layers that it changed, each with its scheme.")
    return {str(row["name"]): parse_scheme(str(row["scheme"])) for row in changed}


def _is_change(row: object) -> bool:
    return isinstance(row, Mapping) and {"name", "scheme"} <= row.keys()


def _ours(description: Mapping[str, Any]) -> nn.Module:
    config = description.get("model")
    if not isinstance(config, Mapping):
        named = str(description.get("name"))
        function = named if ".py:" in named else "path.py:function"
        raise LowRankError(
            f"{description.get('class') or 'the network'} is not one of our networks: name the function that "
            f"builds it as --into {function}; in Python, build the unconverted network and call "
            "lowrank_cnn.load(path, into=network)."
        )
    try:
        return build_network(**config)
    except (TypeError, RuntimeError, OverflowError) as error:  # wrong types, or sizes that torch cannot hold
        name = str(config.get("name"))[:60]
        raise LowRankError(f"the stored options of {name} are not those of a network.") from error
