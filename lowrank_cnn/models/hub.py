"""Share networks as folders or repositories of the Hugging Face Hub; reading one runs no code.

| file              | holds                                                                              |
|-------------------|------------------------------------------------------------------------------------|
| model.safetensors | weights, how to build the network, classes, preprocessing: `from_pretrained` reads it |
| config.json       | the same description as plain JSON, for people and other programs                   |
| README.md         | the model card                                                                     |
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lowrank_cnn.core.errors import LowRankError, first_line, require
from lowrank_cnn.core.files import as_path, replacing, write_atomically, write_json
from lowrank_cnn.core.notes import notes
from lowrank_cnn.core.text import counted, first_few, si
from lowrank_cnn.method.count import count
from lowrank_cnn.models.build import dense_cost
from lowrank_cnn.models.network_file import Stored, read_header, read_weights, write_weights

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


def _model_card(
    stored: Stored, description: Mapping[str, Any], metrics: Mapping[str, float], licence: str | None, name: str
) -> str:
    """README.md as the Hub shows it: YAML for its search, then Markdown for people."""
    hub = require("huggingface_hub", extra="hub", purpose="a model card")
    card = stored.card.card if stored.card else {}
    data = str(card.get("data", {}).get("name", ""))
    trained = card.get("trained", {})
    measured = metrics or {key: trained[key] for key in _METRICS if key in trained}
    kind = str((description["model"] or {}).get("name") or description["class"])
    known: dict[str, str] = dict.fromkeys(("dataset_type", "dataset_name"), data or "unknown")
    known["task_type"] = "image-classification"
    results = [
        hub.EvalResult(metric_type=_METRICS.get(key, key), metric_value=round(value, 6), **known)
        for key, value in measured.items()
    ]
    header = hub.ModelCardData(
        library_name="lowrank-cnn",
        license=licence,
        pipeline_tag="image-classification",
        tags=["low-rank", "convolutional-network", "pytorch", kind],
        model_name=name,
        eval_results=results or None,
    ).to_yaml()
    changed = description["conversion"]["changed"]
    schemes = ", ".join(dict.fromkeys(f"`{row['scheme']}`" for row in changed))
    rewritten = f" It has {counted(len(changed), 'layer')} rewritten by {schemes}." if changed else ""
    into = "" if description["model"] is not None else ", into=your_network"
    line = 'lr.predict(net, "photo.jpg")' if card else "net(images)"
    parts = [
        f"---\n{header}\n---\n",
        f"# {name}\n",
        f"A `{kind}` network of [lowrank-cnn], with low-rank filters after {PAPER}.{rewritten}\n",
        "[lowrank-cnn]: https://pypi.org/project/lowrank-cnn/\n",
        _cost(stored),
        _trained(card, data),
        "## Use\n\n" + _USE.format(name=name, into=into, line=line),
    ]
    return "\n".join(filter(None, parts))


def _cost(stored: Stored) -> str:
    if stored.input_size is None:
        return ""
    size = "x".join(map(str, stored.input_size))
    try:
        cost = count(stored.network, stored.input_size)
        dense = dense_cost(stored.network, stored.input_size)
    except LowRankError:
        return f"It takes images of {size}.\n"
    this = f"| this network, {size} | {si(cost.macs)} | {si(cost.params)} |"
    lines = ["| | MACs | parameters |", "| --- | ---: | ---: |", this]
    if dense is not None and dense[0] != cost.macs:
        lines.append(f"| its dense twin | {si(dense[0])} | {si(dense[1])} |")
    return "\n".join(lines) + "\n"


def _trained(card: Mapping[str, Any], data: str) -> str:
    if not card:
        return "It has no classes yet: train it, or use it as a start.\n"
    classes, recipe = card["data"]["classes"], card["recipe"]
    on = f" on {data}" if data else ""
    return (
        f"It was trained{on} for {counted(recipe['epochs'], 'epoch')} by the recipe `{recipe['name']}` "
        f"(in {CONFIG}), and knows {counted(len(classes), 'class')}: {first_few([*map(str, classes)])}.\n"
    )


PREFIX = "hf-hub:"
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")


def save_pretrained(
    network: nn.Module,
    folder: str | Path,
    *,
    metrics: Mapping[str, float] | None = None,
    licence: str | None = None,
    name: str | None = None,
) -> Path:
    """Write a network into a folder that `from_pretrained` reads, with its model card.

    `metrics` (such as `{"top1": 0.93}`) and `licence` are stated on the card.

    >>> import lowrank_cnn as lr, tempfile
    >>> network = lr.create_model("nin-c3-lr", pretrained="cifar10")
    >>> folder = lr.save_pretrained(network, tempfile.mkdtemp())
    >>> lr.from_pretrained(folder).config["name"]
    'nin-c3-lr'
    """
    folder, known = Path(folder), notes(network).training_card  # its classes, and how it prepares images
    stored = Stored(network, notes(network).input_size, known)
    with replacing(folder / WEIGHTS) as temporary:
        write_weights(temporary, stored)
    description = read_header(folder / WEIGHTS).description
    tensors = known.preprocess if known else {}
    preprocess = {key: tensor.tolist() for key, tensor in tensors.items() if tensor.dim() <= 1}
    write_json(folder / CONFIG, {"library_name": "lowrank-cnn", **description, "preprocess": preprocess})
    card = _model_card(stored, description, metrics or {}, licence, name or folder.name)
    write_atomically(folder / CARD, card.encode())
    return folder


def push_to_hub(
    network: nn.Module,
    repository: str,
    *,
    metrics: Mapping[str, float] | None = None,
    licence: str | None = None,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Upload a network to the Hugging Face Hub, with its model card, and return the address of the commit.

    The repository is made if it does not exist. Log in with `hf auth login`, or give a token.

    >>> net.push_to_hub("user/nin-c3-lr", metrics={"top1": 0.933})  # doctest: +SKIP
    'https://huggingface.co/user/nin-c3-lr/commit/...'
    """
    if not _REPOSITORY.fullmatch(repository) or "@" in repository:
        raise LowRankError(f"a repository of the Hub is written user/name, not {repository!r}.")
    hub = require("huggingface_hub", extra="hub", purpose="the Hugging Face Hub")
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(network, folder, metrics=metrics, licence=licence, name=repository)
        try:
            api = hub.HfApi(token=token)
            api.create_repo(repository, private=private, exist_ok=True)
            told = "Upload a network of lowrank-cnn"
            done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=told)
        except Exception as error:  # network, permission and unknown names have no common ancestor
            raise LowRankError(
                f"{repository} could not be uploaded ({first_line(error)}): check the name, the network, and that "
                "you are logged in (hf auth login)."
            ) from error
    return str(done.commit_url)


def from_pretrained(source: str | Path, *, into: nn.Module | None = None) -> nn.Module:
    """The network in a folder or in a repository of the Hugging Face Hub, in evaluation mode.

    `source` is a folder, `"user/name"`, or `"user/name@revision"`. `into` is for weights of a network of your own:
    that network, before any conversion; it is left unchanged. The network carries its classes and preprocessing,
    so `lr.predict(network, "photo.jpg")` works. Only safetensors are read; stored code is never run.

    >>> import lowrank_cnn as lr
    >>> net = lr.from_pretrained("user/nin-c3-lr")  # doctest: +SKIP
    """
    path = resolve(source)
    if not path.exists() and _REPOSITORY.fullmatch(str(source)):
        path = _download(str(source))
    if path.is_dir():
        raise LowRankError(
            f"{path} holds no {WEIGHTS}: write it with save_pretrained, or read a run with lr.load."
        )
    return read_weights(path, into=into).network.eval()


def resolve(source: str | Path) -> Path:
    """The local path of what a user named: `hf-hub:` names are downloaded, saved folders lead to their weights."""
    if str(source).startswith(PREFIX):
        return _download(str(source).removeprefix(PREFIX))
    path = as_path(source)
    saved = (path / WEIGHTS).is_file() and (path / CONFIG).is_file()
    return path / WEIGHTS if saved else path


def _download(text: str) -> Path:
    repository, _, revision = text.partition("@")
    if not _REPOSITORY.fullmatch(text):
        raise LowRankError(f"a repository of the Hub is written user/name, not {text!r}.")
    hub = require("huggingface_hub", extra="hub", purpose="the Hugging Face Hub")
    try:
        return Path(hub.hf_hub_download(repository, WEIGHTS, revision=revision or None))
    except Exception as error:  # network, permission and unknown names have no common ancestor
        raise LowRankError(
            f"{repository} is no local folder, and its {WEIGHTS} could not be fetched from the Hub "
            f"({first_line(error)}): check the name, the network, and that you are logged in if it is private."
        ) from error
