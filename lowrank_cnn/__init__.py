"""Cheaper convolutional networks: low-rank filters, learned from scratch, and the time they save.

import lowrank_cnn as lr
net = lr.create_model("vgg11-gmp-lr-join", num_classes=100)
lr.count(net, (3, 224, 224)).macs
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowrank_cnn.core import __version__

if TYPE_CHECKING:
    from lowrank_cnn.choose.compare import compare
    from lowrank_cnn.choose.design import design
    from lowrank_cnn.choose.learn_shapes import learn_shapes
    from lowrank_cnn.core.errors import LowRankError, MissingExtra
    from lowrank_cnn.core.notes import Notes, notes
    from lowrank_cnn.data import inspect_data, open_data
    from lowrank_cnn.deploy.export import export, load
    from lowrank_cnn.deploy.optimize import optimize
    from lowrank_cnn.deploy.plan import plan
    from lowrank_cnn.deploy.quantize import quantize
    from lowrank_cnn.deploy.timing import time_model
    from lowrank_cnn.graph.finalize_shapes import LearnedShapes, load_shapes
    from lowrank_cnn.graph.merge import merge
    from lowrank_cnn.method.convert import conversion_costs, convert
    from lowrank_cnn.method.count import Count, count
    from lowrank_cnn.method.decompose import decompose
    from lowrank_cnn.method.init import composite_sigma, init_
    from lowrank_cnn.method.layers import CompositeConv2d, CompositeConv3d
    from lowrank_cnn.method.prune import prune
    from lowrank_cnn.method.schemes import Basis, FactoredConv2d, Scheme, build_conv, parse_scheme, register_scheme
    from lowrank_cnn.method.select import stages
    from lowrank_cnn.method.spec import Composite, FilterGroup
    from lowrank_cnn.method.thin import thin
    from lowrank_cnn.models import Network, create_model, list_models, list_pretrained
    from lowrank_cnn.models.hub import from_pretrained, push_to_hub, save_pretrained
    from lowrank_cnn.report import write_report
    from lowrank_cnn.train.evaluate import evaluate, predict
    from lowrank_cnn.train.find_lr import find_lr
    from lowrank_cnn.train.fit import fit
    from lowrank_cnn.train.recipes import get_recipe
    from lowrank_cnn.train.trained import load_pretrained

# Every public name is loaded when it is first used, so that `import lowrank_cnn` does not wait for torch.
_HOMES = {
    "choose.compare": ["compare"],
    "choose.design": ["design"],
    "choose.learn_shapes": ["learn_shapes"],
    "core.errors": ["LowRankError", "MissingExtra"],
    "core.notes": ["Notes", "notes"],
    "data": ["inspect_data", "open_data"],
    "deploy.export": ["export", "load"],
    "deploy.optimize": ["optimize"],
    "deploy.plan": ["plan"],
    "deploy.quantize": ["quantize"],
    "deploy.timing": ["time_model"],
    "graph.merge": ["merge"],
    "method.convert": ["conversion_costs", "convert"],
    "method.count": ["Count", "count"],
    "method.decompose": ["decompose"],
    "graph.finalize_shapes": ["LearnedShapes", "load_shapes"],
    "method.init": ["composite_sigma", "init_"],
    "method.layers": ["CompositeConv2d", "CompositeConv3d"],
    "method.prune": ["prune"],
    "method.schemes": ["Basis", "FactoredConv2d", "Scheme", "build_conv", "parse_scheme", "register_scheme"],
    "method.select": ["stages"],
    "method.spec": ["Composite", "FilterGroup"],
    "method.thin": ["thin"],
    "models": ["Network", "create_model", "list_models", "list_pretrained"],
    "models.hub": ["from_pretrained", "push_to_hub", "save_pretrained"],
    "report": ["write_report"],
    "train.find_lr": ["find_lr"],
    "train.fit": ["fit"],
    "train.recipes": ["get_recipe"],
    "train.evaluate": ["evaluate", "predict"],
    "train.trained": ["load_pretrained"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'lowrank_cnn' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lowrank_cnn.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "Basis",
    "Composite",
    "CompositeConv2d",
    "CompositeConv3d",
    "Count",
    "FactoredConv2d",
    "FilterGroup",
    "LearnedShapes",
    "LowRankError",
    "MissingExtra",
    "Network",
    "Notes",
    "Scheme",
    "__version__",
    "build_conv",
    "compare",
    "composite_sigma",
    "conversion_costs",
    "convert",
    "count",
    "create_model",
    "decompose",
    "design",
    "evaluate",
    "export",
    "find_lr",
    "fit",
    "from_pretrained",
    "get_recipe",
    "init_",
    "inspect_data",
    "learn_shapes",
    "list_models",
    "list_pretrained",
    "load",
    "load_pretrained",
    "load_shapes",
    "merge",
    "notes",
    "open_data",
    "optimize",
    "parse_scheme",
    "plan",
    "predict",
    "prune",
    "push_to_hub",
    "quantize",
    "register_scheme",
    "save_pretrained",
    "stages",
    "thin",
    "time_model",
    "write_report",
]
