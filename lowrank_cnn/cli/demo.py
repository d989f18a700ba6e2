"""The command `lowrank demo`: `compare` on real digits, in two minutes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lowrank_cnn.cli.compare import print_comparison
from lowrank_cnn.cli.options import Device, Json, Limit, option
from lowrank_cnn.cli.show import continued_by_same_command, print_json

if TYPE_CHECKING:
    from lowrank_cnn.choose.compare import Comparison

WIDTH, STRIDE, MINUTES = 0.25, 2, 2.5


def demo_command(
    out: Annotated[Path, option("Folder of all that the demo writes.", "--out", "-o")] = Path("runs/demo"),
    epochs: Annotated[int | None, option("Train this many epochs instead of the recipe's.")] = None,
    device: Device = "auto",
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Compare a dense network with a thinner and a low-rank one on digits.

    It takes two to three minutes on two CPU cores and downloads nothing.

    Examples:

      lowrank demo
      lowrank demo --epochs 1 --out runs/quick
    """
    with continued_by_same_command():
        found = demo(out, epochs=epochs, device=device, limit=limit)
    return print_json(found.to_dict()) if as_json else print_comparison(found)


def demo(
    out: str | Path, *, epochs: int | None = None, device: str = "auto", limit: int | None = None
) -> Comparison:
    """Compare three Network-in-Networks, or go on with that; Lin et al. (2013) have the network."""
    from lowrank_cnn.choose.compare import compare
    from lowrank_cnn.data import open_data
    from lowrank_cnn.models import create_model

    digits = open_data("digits", limit=limit)
    shape: dict[str, Any] = {"num_classes": len(digits.classes), "in_channels": 1}
    make = partial(create_model, "nin", width=WIDTH, stride=STRIDE, norm="batch", **shape)
    own: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
    how: dict[str, Any] = {"recipe": "digits", "schemes": ("lr",), "for_": "cpu", "device": device}
    return compare(make, digits, out=out, minutes=MINUTES, **how, **own)
