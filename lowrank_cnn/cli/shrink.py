"""The command `lowrank shrink`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowrank_cnn.cli.options import Json, Missing, Workers, option
from lowrank_cnn.cli.show import console, print_json


def shrink_command(
    source: Annotated[str, typer.Argument(help="A folder of images or shards, or a Hub repository.")],
    out: Annotated[Path, typer.Argument(help="Folder of the new shards; shards that exist are kept.")],
    side: Annotated[int, option("The shorter side of the stored images.")] = 256,
    quality: Annotated[int, option("JPEG quality, up to 100.")] = 95,
    workers: Workers = 0,
    missing: Missing = "refuse",
    as_json: Json = False,
) -> None:
    """Store large photographs at the size that training needs.

    Every epoch then decodes fewer pixels.

    Examples:

      lowrank shrink photos small
      lowrank shrink photos small --side 128 --quality 90
    """
    from lowrank_cnn.data.shrink import shrink

    problems = shrink(source, out, side=side, quality=quality, workers=workers, missing=missing)
    size = sum(path.stat().st_size for path in out.glob("*.parquet"))
    if as_json:
        counts = {name: found.counts for name, found in problems.items()}
        return print_json({"out": str(out), "bytes": size, "problems": counts})
    for name, found in problems.items():
        if found:
            console.print(f"Left out of {name}: {found}")
    console.print(f"{size / 1e9:.2f} GB in {out}: `lowrank train NETWORK --data {out}`", soft_wrap=True)
    return None
