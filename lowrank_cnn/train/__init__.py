"""Train networks: recipes, a loop that can be killed and resumed, and the record of each run."""

from __future__ import annotations

from lowrank_cnn.train.failure import Interrupted, NotFiniteError, OutOfMemoryError
from lowrank_cnn.train.fit import fit
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.recipes import RECIPES, get_recipe
from lowrank_cnn.train.run_folder import Record, load_record

__all__ = [
    "RECIPES",
    "Interrupted",
    "NotFiniteError",
    "OutOfMemoryError",
    "Recipe",
    "Record",
    "fit",
    "get_recipe",
    "load_record",
]
