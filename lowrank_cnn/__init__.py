"""Cheaper convolutional networks: low-rank filters, learned from scratch, and the time they save.

import lowrank_cnn as lr
net = lr.create_model("vgg11-gmp-lr-join", num_classes=100)
lr.count(net, (3, 224, 224)).macs
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowrank_cnn._version import __version__
from lowrank_cnn.convert import conversion_costs, convert
from lowrank_cnn.count import Count, count
from lowrank_cnn.decompose import decompose
from lowrank_cnn.errors import LowRankError, MissingExtra
from lowrank_cnn.init import composite_sigma, init_
from lowrank_cnn.layers import CompositeConv2d, FactoredConv2d, build_conv
from lowrank_cnn.models import Network, create_model, list_models, list_pretrained
from lowrank_cnn.scheme import Scheme, parse_scheme
from lowrank_cnn.selection import stages
from lowrank_cnn.spec import Composite, FilterGroup

if TYPE_CHECKING:
    from lowrank_cnn.data import open_data
    from lowrank_cnn.deploy import export, load, merge, optimize, plan
    from lowrank_cnn.evaluation import evaluate, predict
    from lowrank_cnn.report import write_report
    from lowrank_cnn.timing import time_model
    from lowrank_cnn.train import fit, get_recipe
    from lowrank_cnn.trained import load_pretrained

# Parts that take longer to load than torch's own import are loaded when first asked for.
_LATER = {
    "evaluate": "lowrank_cnn.evaluation",
    "export": "lowrank_cnn.deploy",
    "fit": "lowrank_cnn.train",
    "get_recipe": "lowrank_cnn.train",
    "load": "lowrank_cnn.deploy",
    "load_pretrained": "lowrank_cnn.trained",
    "merge": "lowrank_cnn.deploy",
    "open_data": "lowrank_cnn.data",
    "optimize": "lowrank_cnn.deploy",
    "plan": "lowrank_cnn.deploy",
    "predict": "lowrank_cnn.evaluation",
    "time_model": "lowrank_cnn.timing",
    "write_report": "lowrank_cnn.report",
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
    "conversion_costs",
    "convert",
    "count",
    "create_model",
    "decompose",
    "evaluate",
    "export",
    "fit",
    "get_recipe",
    "init_",
    "list_models",
    "list_pretrained",
    "load",
    "load_pretrained",
    "merge",
    "open_data",
    "optimize",
    "parse_scheme",
    "plan",
    "predict",
    "stages",
    "time_model",
    "write_report",
]
