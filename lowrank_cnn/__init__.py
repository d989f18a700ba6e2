"""Cheaper convolutional networks: low-rank filters, learned from scratch, and the time they save.

import lowrank_cnn as lr
net = lr.create_model("vgg11-gmp-lr-join", num_classes=100)
lr.count(net, (3, 224, 224)).macs
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowrank_cnn._version import __version__
from lowrank_cnn.count import Count, count
from lowrank_cnn.errors import LowRankError, MissingExtra
from lowrank_cnn.init import composite_sigma, init_
from lowrank_cnn.layers import CompositeConv2d, FactoredConv2d, build_conv
from lowrank_cnn.models import Network, create_model, list_models
from lowrank_cnn.spec import Composite, FilterGroup, Scheme, parse_scheme

if TYPE_CHECKING:
    from lowrank_cnn.data import open_data
    from lowrank_cnn.evaluate import evaluate
    from lowrank_cnn.train import fit

# Parts that take longer to load than torch's own import are loaded when first asked for.
_LATER = {
    "open_data": "lowrank_cnn.data",
    "fit": "lowrank_cnn.train",
    "evaluate": "lowrank_cnn.evaluate",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'lowrank_cnn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "Composite",
    "CompositeConv2d",
    "Count",
    "FactoredConv2d",
    "FilterGroup",
    "LowRankError",
    "MissingExtra",
    "Network",
    "Scheme",
    "__version__",
    "build_conv",
    "composite_sigma",
    "count",
    "create_model",
    "evaluate",
    "fit",
    "init_",
    "list_models",
    "open_data",
    "parse_scheme",
]
