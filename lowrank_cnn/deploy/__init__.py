"""From a trained network to one that runs: merge exactly, measure what is fastest, export, load back."""

import sys

from lowrank_cnn import _moved
from lowrank_cnn.deploy.exporting import export, load
from lowrank_cnn.deploy.merging import merge
from lowrank_cnn.deploy.optimizing import optimize
from lowrank_cnn.deploy.planning import plan

__all__ = ["export", "load", "merge", "optimize", "plan"]

sys.modules[__name__].__class__ = _moved.Package
