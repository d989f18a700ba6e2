"""Seal JSON objects with a checksum of their values, so that damage is noticed when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from lowrank_cnn.system.errors import LowRankError

SEAL = "sha256"
"""The key that holds the checksum of all other values."""


class BrokenSealError(LowRankError):
    """The values are not those that were sealed."""


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with their checksum, which does not depend on the order of keys or on spaces in the file.

    >>> sealed({"top1": 0.9})["sha256"][:8]
    '8a0ed2d5'
    """
    values = json.loads(json.dumps(values))  # as they will be read: keys become text
    return {**values, SEAL: _checksum(values)}


def unsealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without their checksum, which must fit them; values that have none are returned as they are."""
    content = {key: value for key, value in values.items() if key != SEAL}
    if SEAL in values and values[SEAL] != _checksum(content):
        raise BrokenSealError("its checksum is not the one that was written")
    return content


def is_sealed(values: Mapping[str, Any]) -> bool:
    """Whether the values have a checksum; older files have none."""
    return SEAL in values


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
