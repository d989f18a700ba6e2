"""Convert, count and run one network of timm or torchvision; a failure becomes a row of the table too.

If possible, a network is built on the meta device first, so a network without spatial convolutions costs nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

Row = dict[str, Any]


def examine(text: str, scheme: str, largest: int) -> Row:
    """One network: MACs before and after, layers changed, and whether it runs; or why not."""
    start, row = time.monotonic(), {"network": text}
    try:
        row |= _examined(text, scheme, largest)
    except Exception as error:
        row |= {"outcome": "failed", "why": f"{type(error).__name__}: {_first_line(error)}"}
    return row | {"seconds": round(time.monotonic() - start, 1)}


def _examined(text: str, scheme: str, largest: int) -> Row:
    from lowrank_cnn.method.convert import convert
    from lowrank_cnn.method.select import NothingToConvertError

    light = _on_meta(text)
    network, size = light or _build(text)
    try:
        new = convert(network, scheme)
    except NothingToConvertError as nothing:
        return {"outcome": "nothing to convert", "why": _first_line(nothing)}
    row = _counted(network, new, size)
    if row["params_before"] > largest:
        return {"outcome": "counted", "why": f"{row['params_before'] / 1e6:.0f}M parameters", **row}
    if light:
        network, _ = _build(text)
        new = convert(network, scheme)
    shapes = [_shape_of(net, size) for net in (light[0] if light else network, new)]
    if shapes[0] != shapes[1]:
        return {"outcome": "failed", "why": f"gives {shapes[1]} in place of {shapes[0]}", **row}
    return {"outcome": "converted", **row}


def _counted(network: Any, new: Any, size: tuple[int, ...]) -> Row:
    from lowrank_cnn.core.notes import notes
    from lowrank_cnn.method.convert import conversion_costs

    total = conversion_costs(network, new, size)[-1]
    conversion = notes(new).conversion
    assert conversion is not None
    reasons = Counter(kept.reason for kept in conversion.kept)
    return {
        "input": "x".join(map(str, size)),
        "macs_before": total.macs_before,
        "macs_after": total.macs_after,
        "params_before": total.params_before,
        "params_after": total.params_after,
        "changed": len(conversion.changed),
        "kept": dict(reasons.most_common(4)),
    }


def _on_meta(text: str) -> tuple[Any, tuple[int, ...]] | None:
    """The network on the meta device, or None if it cannot be built there."""
    import torch

    try:
        with torch.device("meta"):
            return _build(text)
    except Exception:
        return None


def _build(text: str) -> tuple[Any, tuple[int, ...]]:
    from lowrank_cnn.cli.source import find_model

    source = find_model(text)
    size = source.size((3, 299, 299) if text == "torchvision:inception_v3" else None)
    return source.network.eval(), size


def _shape_of(network: Any, size: tuple[int, ...]) -> Any:
    import torch

    device = next(network.parameters()).device
    with torch.no_grad(), torch.device(device):
        return _shape(network(torch.zeros(1, *size)))


def _shape(output: Any) -> Any:
    """Shapes of all outputs of a network."""
    if hasattr(output, "shape"):
        return list(output.shape)
    values = output.values() if hasattr(output, "values") else output
    return [_shape(value) for value in values] if hasattr(values, "__iter__") else []


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]
