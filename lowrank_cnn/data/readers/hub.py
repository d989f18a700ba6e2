"""Sets of the Hugging Face Hub, fetched as parquet shards into its own cache."""

from __future__ import annotations

import re
from pathlib import Path

from lowrank_cnn.system.errors import LowRankError, require

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# ILSVRC's test images come without labels: 13 GB that nothing here could use.
_WANTED = {"ILSVRC/imagenet-1k": ("data/train-*.parquet", "data/validation-*.parquet")}


def is_repository(source: str) -> bool:
    """Whether the text has the form `owner/name`."""
    return _REPOSITORY.fullmatch(source) is not None


def fetch(repository: str) -> Path:
    """The local folder of the set's shards, downloaded where they are not cached yet."""
    hub = require("huggingface_hub", extra="data", purpose="fetching a set from the Hub")
    wanted = list(_WANTED.get(repository, ("*.parquet",)))
    try:
        return Path(hub.snapshot_download(repository, repo_type="dataset", allow_patterns=wanted))
    except Exception as error:  # network, permission, disk and unknown names have no common ancestor
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise LowRankError(
            f"{repository} is no local folder and cannot be fetched from the Hub ({lines[0].rstrip('.')}): "
            "check its name, the network, and for a gated set that you are logged in."
        ) from error
