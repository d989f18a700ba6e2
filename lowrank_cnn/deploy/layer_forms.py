"""One conv as strips and as a thinner dense conv with as many MACs: their times, and what each would lose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from lowrank_cnn.method.building import build_conv
from lowrank_cnn.method.channel_order import free_routes
from lowrank_cnn.method.scheme import parse_scheme
from lowrank_cnn.method.shape_damage import Damage, damage_by_loss
from lowrank_cnn.method.shape_network import shape_network
from lowrank_cnn.system.errors import LowRankError, first_line
from lowrank_cnn.train.outputs import class_scores

LOW_RANK, THINNER = "low-rank", "thinner"
CLEARLY = 0.97
"""Times that differ by less than this are called equal: then thinner is advised, which is simpler."""
LIKED = 16
"""Kernels of most engines are made for multiples of this many filters."""


@dataclass(frozen=True)
class LayerAdvice:
    """One conv: milliseconds dense, as strips, and thinner with as many MACs; what each loses, where measured."""

    name: str
    dense_ms: float
    strips_ms: float
    thin_ms: float
    strips_lose: float | None
    thin_loses: float | None
    choice: str
    why: str


def variants_of(conv: nn.Conv2d) -> dict[str, nn.Module]:
    """A conv, its strips, and a dense conv with as many MACs as these; also with filters in a number that suits.

    Of 64 filters a third is 21, which may take longer than 32: a user would take those.
    """
    options: dict[str, Any] = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    options["padding_mode"] = conv.padding_mode
    strips = build_conv(
        conv.in_channels, conv.out_channels, conv.kernel_size, "lr", bias=conv.bias is not None, **options
    )
    height, width = conv.kernel_size
    fewer = max(1, round(conv.out_channels * (height + width) / 2 / (height * width)))
    numbers = {"thin": fewer, "thin, rounded up": min(conv.out_channels, -(-fewer // LIKED) * LIKED)}
    thin = {
        name: nn.Conv2d(conv.in_channels, filters, (height, width), bias=conv.bias is not None, **options)
        for name, filters in numbers.items()
    }
    return {"dense": conv, "strips": strips, **thin}


def layer_advice(name: str, ms: Mapping[str, float], damage: Mapping[str, Damage] | None) -> LayerAdvice:
    """The form that is faster with as many MACs or, where damage is known, that loses less in as much time."""
    thin = min(time for form, time in ms.items() if form.startswith("thin"))
    told = f"strips take {ms['strips'] / ms['dense']:.2f} of its time, a thinner conv with as many MACs "
    told += f"{thin / ms['dense']:.2f}"
    faster = LOW_RANK if ms["strips"] < CLEARLY * thin else THINNER
    row = LayerAdvice(name, ms["dense"], ms["strips"], thin, None, None, faster, told)
    if damage is None or name not in damage:
        return row
    strips, thinner = _losses(damage[name], min(1.0, ms["strips"] / ms["dense"]))
    choice = LOW_RANK if strips < thinner else THINNER
    why = f"at the time of strips, strips would lose {strips:.2f} and a thinner conv {thinner:.2f}"
    return replace(row, strips_lose=strips, thin_loses=thinner, choice=choice, why=why)


def _losses(damage: Damage, time: float) -> tuple[float, float]:
    """The shares lost by strips in all filters, and by removing the filters that matter least, at equal time."""
    strips = float(damage.shapes.min(1).values.sum()) / damage.whole
    removed = round((1 - time) * len(damage.removal))
    return strips, float(damage.removal.sort().values[:removed].sum()) / damage.whole


def measured_damage(
    model: nn.Module,
    example: Tensor,
    data: Iterable[tuple[Tensor, Tensor]],
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> dict[str, Damage]:
    """What strips and removals would lose in each layer, on batches of (images, targets)."""
    batches, size = list(data), tuple(example.shape[1:])
    if not batches or not all(isinstance(batch, tuple | list) and len(batch) == 2 for batch in batches):
        raise LowRankError("data has a few batches, each of (images, targets).")
    shaped = shape_network(model, parse_scheme("learned(kx1, 1xk, none)"), size)
    try:
        return damage_by_loss(shaped, free_routes(shaped, size), batches, loss or _cross_entropy)
    except LowRankError:
        raise
    except Exception as error:  # a loss of the user's own may fail in any way
        raise LowRankError(f"the loss cannot be computed on data: {first_line(error)}.") from error


def _cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(class_scores(outputs), targets)
