"""Fill the tables of README and docs from the records they come from.

    python docs/blocks.py            write them
    python docs/blocks.py --check    exit with 1 if one is out of date

A table is between `<!-- begin NAME -->` and `<!-- end NAME -->`; `TABLES` has the function that makes NAME.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tables import (
    cifar10,
    decompose,
    depth,
    depthwise,
    engines,
    foreign,
    frontier,
    full_run,
    gpu,
    gpu_models,
    headline,
    learned,
    memory,
    pipeline,
    records,
    reference,
    search,
    tiny_imagenet,
    zoo,
)
from tables.form import ROOT

BLOCK = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)

TABLES: dict[str, Callable[[], str]] = {
    "cifar-search-modern": partial(search.search, "cifar10", norm=True),
    "cifar-search-paper": partial(search.search, "cifar10", norm=False),
    "tiny-search": partial(search.search, "tiny-imagenet"),
    "cifar10-init": cifar10.cifar10_init,
    "cifar10-paper": cifar10.cifar10_paper,
    "cifar10-modern": cifar10.cifar10_modern,
    "commands": reference.commands,
    "cpu-engines": engines.cpu_engines,
    "cpu-verdicts": engines.speed_verdicts,
    "decompose": decompose.decompose,
    "decompose-aware": decompose.decompose_aware,
    "depth-flow": depth.depth_flow,
    "digits-compared": partial(frontier.compared, "digits"),
    "depthwise": depthwise.layers,
    "depthwise-accuracy": depthwise.accuracy,
    "depthwise-networks": depthwise.networks,
    "depthwise-engines": engines.depthwise_engines,
    "volumes": depthwise.volumes,
    "modelnet10": depthwise.shapes,
    "foreign": foreign.foreign,
    "foreign-summary": foreign.summary,
    "frontier": frontier.frontier,
    "frontier-questions": frontier.questions,
    "fewest-operations": frontier.fewest_operations,
    "short-run": frontier.short_run,
    "full-run": full_run.full_run,
    "gpu-layers": gpu.gpu_layers,
    "gpu-models": gpu_models.gpu_models,
    "gpu-small": gpu.gpu_small,
    "gpu-speed": gpu.gpu_speed,
    "gpu-training": gpu.gpu_training,
    "headline": headline.headline,
    "init-depth": depth.init_depth,
    "join-depth": depth.join_depth,
    "initialisations": learned.initialisations,
    "learned-shapes": learned.learned_shapes,
    "int8-accuracy": engines.int8_accuracy,
    "mac-time": engines.mac_time,
    "int8-training": engines.int8_training,
    "input-pipeline": pipeline.input_pipeline,
    "loaders": pipeline.loaders,
    "memory": memory.memory,
    "nin-compared": partial(frontier.compared, "nin"),
    "recipes": reference.recipes,
    "records": records.records,
    "speed-verdicts": gpu_models.speed_verdicts,
    "tiny-imagenet": tiny_imagenet.tiny_imagenet,
    "train-speed": gpu.train_speed,
    "verdicts": frontier.verdicts,
    "zoo": zoo.zoo,
}


def filled(text: str) -> str:
    return BLOCK.sub(lambda match: match[1] + _table(match[2]) + match[3], text)


@cache
def _table(name: str) -> str:
    return TABLES[name]()


def stale() -> list[Path]:
    """The pages whose tables differ from the records."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in pages if filled(page.read_text()) != page.read_text()]


def main() -> None:
    check, pages = "--check" in sys.argv, stale()
    for page in pages:
        print(f"{'out of date' if check else 'written'}: {page.relative_to(ROOT)}")
        if not check:
            page.write_text(filled(page.read_text()))
    sys.exit(1 if pages and check else 0)


if __name__ == "__main__":
    main()
