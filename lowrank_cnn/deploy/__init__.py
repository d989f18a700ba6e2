"""From a trained network to one that runs: merge exactly, measure what is fastest, export, load back."""

from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.deploy.merge import merge
from lowrank_cnn.deploy.optimize import optimize
from lowrank_cnn.deploy.plan import plan

__all__ = ["export", "load", "merge", "optimize", "plan"]
