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

from lowrank_cnn.models.files import Stored, read_weights, write_weights
from lowrank_cnn.models.model_card import write_card
from lowrank_cnn.models.network_file import read_header
from lowrank_cnn.system.errors import LowRankError, first_line, require
from lowrank_cnn.system.files import as_path, replacing, write_json
from lowrank_cnn.system.provenance import notes

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
    folder = Path(folder)
    stored = _stored(network)
    with replacing(folder / WEIGHTS) as temporary:
        write_weights(temporary, stored)
    description = read_header(folder / WEIGHTS).description
    preprocess = {key: tensor.tolist() for key, tensor in stored.preprocess.items() if tensor.dim() <= 1}
    write_json(folder / CONFIG, {"library_name": "lowrank-cnn", **description, "preprocess": preprocess})
    write_card(folder / CARD, stored, description, metrics or {}, licence, name or folder.name)
    return folder


def push_to_hub(
    network: nn.Module,
    repository: str,
    *,
    metrics: Mapping[str, float] | None = None,
    licence: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    message: str = "Upload a network of lowrank-cnn",
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
            done = api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=message, revision=revision
            )
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


def is_hub_name(source: str | Path) -> bool:
    """Whether a text is the name of a repository of the Hub, with `hf-hub:` before it."""
    return str(source).startswith(PREFIX)


def resolve(source: str | Path) -> Path:
    """The local path of what a user named: `hf-hub:` names are downloaded, saved folders lead to their weights."""
    if is_hub_name(source):
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


def _stored(network: nn.Module) -> Stored:
    """A network with the classes and the preprocessing that it carries."""
    about = notes(network)
    carried: dict[str, Any] = {}
    if about.training_card is not None:
        carried = {"card": about.training_card.card, "preprocess": dict(about.training_card.preprocess)}
    return Stored(network, about.input_size, **carried)
