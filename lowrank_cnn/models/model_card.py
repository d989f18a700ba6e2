"""The model card: what a network is, what it costs, how it was trained, and how to use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lowrank_cnn.method.counting import count
from lowrank_cnn.models.files import Stored
from lowrank_cnn.models.twins import dense_cost, dense_twin
from lowrank_cnn.system.errors import LowRankError, require
from lowrank_cnn.system.files import write_atomically
from lowrank_cnn.system.text import counted, si

PAPER = (
    "[Training CNNs with Low-Rank Filters for Efficient Image Classification](https://arxiv.org/abs/1511.06744)"
)
_METRICS = {"top1": "accuracy", "top5": "top-5 accuracy"}
_USE = """```python
import lowrank_cnn as lr

net = lr.from_pretrained("{name}"{into})
{line}
```
"""


def write_card(
    path: Path,
    stored: Stored,
    description: Mapping[str, Any],
    metrics: Mapping[str, float],
    licence: str | None,
    name: str,
) -> None:
    """Write README.md as the Hub shows it: YAML for its search, then Markdown for people."""
    hub = require("huggingface_hub", extra="hub", purpose="a model card")
    card = stored.card or {}
    measured = metrics or {key: card["trained"][key] for key in _METRICS if key in card.get("trained", {})}
    kind = (description["model"] or {}).get("name") or description["class"]
    results = [
        hub.EvalResult(
            task_type="image-classification",
            dataset_type=_data(card) or "unknown",
            dataset_name=_data(card) or "unknown",
            metric_type=_METRICS.get(key, key),
            metric_value=round(value, 6),
        )
        for key, value in measured.items()
    ]
    header = hub.ModelCardData(
        library_name="lowrank-cnn",
        license=licence,
        pipeline_tag="image-classification",
        tags=["low-rank", "convolutional-network", "pytorch", str(kind)],
        model_name=name,
        eval_results=results or None,
    ).to_yaml()
    parts = [
        f"---\n{header}\n---\n",
        f"# {name}\n",
        _about(kind, description),
        _cost(stored),
        _trained(card, measured),
    ]
    ours = description["model"] is not None
    line = 'lr.predict(net, "photo.jpg")' if card else "net(images)"
    parts.append("## Use\n\n" + _USE.format(name=name, into="" if ours else ", into=your_network", line=line))
    write_atomically(path, "\n".join(filter(None, parts)).encode())


def _about(kind: str, description: Mapping[str, Any]) -> str:
    changed = description["conversion"]["changed"]
    schemes = ", ".join(dict.fromkeys(f"`{row['scheme']}`" for row in changed))
    rewritten = f" It has {counted(len(changed), 'layer')} rewritten by {schemes}." if changed else ""
    return f"A `{kind}` network of [lowrank-cnn], with low-rank filters after {PAPER}.{rewritten}\n" + (
        "\n[lowrank-cnn]: https://pypi.org/project/lowrank-cnn/\n"
    )


def _cost(stored: Stored) -> str:
    if stored.input_size is None:
        return ""
    size = "x".join(map(str, stored.input_size))
    try:
        cost, dense = count(stored.network, stored.input_size), _dense(stored)
    except LowRankError:
        return f"It takes images of {size}.\n"
    lines = ["| | MACs | parameters |", "| --- | ---: | ---: |"]
    lines.append(f"| this network, {size} | {si(cost.macs)} | {si(cost.params)} |")
    if dense is not None and dense[0] != cost.macs:
        lines.append(f"| its dense twin | {si(dense[0])} | {si(dense[1])} |")
    return "\n".join(lines) + "\n"


def _dense(stored: Stored) -> tuple[int, int] | None:
    """MACs and parameters of the dense network that this one is compared with."""
    assert stored.input_size is not None
    with torch.device("meta"):
        twin = dense_twin(stored.network)
    if twin is None:
        return dense_cost(stored.network, stored.input_size)
    cost = count(twin, stored.input_size)
    return cost.macs, cost.params


def _trained(card: Mapping[str, Any], measured: Mapping[str, float]) -> str:
    if not card:
        return "It has no classes yet: train it, or use it as a start.\n"
    classes, recipe = card["data"]["classes"], card["recipe"]
    shown = ", ".join(map(str, classes[:10])) + (", ..." if len(classes) > 10 else "")
    lines = [f"## Training\n\n- Classes: {len(classes)} ({shown})"]
    lines.append(
        f"- Recipe: `{recipe['name']}`, {counted(recipe['epochs'], 'epoch')}, batch size {recipe['batch_size']}"
    )
    if data := _data(card):
        lines.append(f"- Images: {data}")
    lines += [f"- {_METRICS.get(key, key)}: {value:.2%}" for key, value in measured.items()]
    details = json.dumps(recipe, indent=1, default=str)
    lines.append(f"\n<details><summary>The whole recipe</summary>\n\n```json\n{details}\n```\n\n</details>\n")
    return "\n".join(lines)


def _data(card: Mapping[str, Any]) -> str:
    """The name of the data set, where the card has one."""
    return str(card.get("data", {}).get("name", "")) if card else ""
