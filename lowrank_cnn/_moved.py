"""Old import paths: every documented path from before the rooms were arranged still imports the same module."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "_version": "system.version",
    "cache": "system.cache",
    "clock": "system.clock",
    "convert": "method.converting",
    "count": "method.counting",
    "data.streamed": "data.stream.streamed",
    "decompose": "method.decomposing",
    "demo": "cli.demo",
    "deploy.export": "deploy.exporting",
    "deploy.merge": "deploy.merging",
    "deploy.network_plan": "system.history",
    "deploy.optimize": "deploy.optimizing",
    "deploy.plan": "deploy.planning",
    "environment": "system.environment",
    "errors": "system.errors",
    "evaluation": "train.evaluation",
    "init": "method.init",
    "kernels.fuse": "kernels.fusing",
    "layers": "method.building",
    "paper.audit": "paper.auditing",
    "paper.reproduce": "paper.reproducing",
    "scheme": "method.scheme",
    "selection": "method.selection",
    "spec": "method.spec",
    "timing": "deploy.timing",
    "trained": "train.trained",
    "units": "system.text",
    "weights": "models.files",
}


class _Alias:
    """Finder and loader that import the module of the new path for an old one.

    It has the methods of importlib.abc's classes but does not derive from them: importing those takes 20 ms.
    """

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != "lowrank_cnn" or rest not in MOVED:
            return None
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module("lowrank_cnn." + MOVED[spec.name.partition(".")[2]])
        self._real[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module ran when it was imported by its own path; the import system relabelled it, so undo that."""
        assert module.__spec__ is not None
        module.__spec__ = self._real.pop(module.__spec__.name)

    def __init__(self) -> None:
        self._real: dict[str, ModuleSpec | None] = {}


class Package(ModuleType):
    """A package whose public functions keep their names when a module of the same old path is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        clashes = isinstance(value, ModuleType) and name in self.__dict__.get("__all__", ())
        if not clashes:
            super().__setattr__(name, value)


def install() -> None:
    """Let old paths be imported."""
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.append(_Alias())  # type: ignore[arg-type]
