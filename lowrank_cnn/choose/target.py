"""Time a network where it will run, and test the file that is shipped.

In torch, a network runs in the form that `optimize` finds. In an engine it is a file, which is timed in a process
of its own. All designs of a record are timed so, in turns with the dense network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.choose.candidates import DENSE, Builder, Design
from lowrank_cnn.choose.frontier import DesignRow, DesignTime, Frontier
from lowrank_cnn.core.clock import Sample, measure
from lowrank_cnn.core.errors import LowRankError, nearest
from lowrank_cnn.core.processes import apart
from lowrank_cnn.data import Data
from lowrank_cnn.deploy import choose_engine
from lowrank_cnn.deploy.choose_engine import write_to_time
from lowrank_cnn.deploy.engines.targets import ENGINES
from lowrank_cnn.deploy.export import export
from lowrank_cnn.deploy.optimize import Optimized, optimize, reoptimize
from lowrank_cnn.deploy.quantize import quantize
from lowrank_cnn.train.distributed import resolve_device
from lowrank_cnn.train.evaluate import evaluate
from lowrank_cnn.train.trained import Trained, load_checkpoint

ENGINE_WORDS = {"onnxruntime": "onnx"}
"""Names of engines that are better known than those of their files."""
PRECISIONS = ("fp32", "fp16", "int8")
GPU_BATCH = 256


@dataclass(frozen=True)
class Target:
    """A device of torch (`engine` is empty), or an engine of `export` on this CPU with a precision.

    `seconds` is the budget of `optimize` for one network.
    """

    device: str = "cpu"
    engine: str = ""
    precision: str = ""
    seconds: float = field(default=30.0, repr=False)

    @classmethod
    def parse(cls, text: str, device: str = "auto") -> Target:
        """The target that a text names; "auto" is the device that trains.

        >>> Target.parse("onnxruntime:int8")
        Target(device='cpu', engine='onnx', precision='int8')
        """
        name, _, precision = text.partition(":")
        name = ENGINE_WORDS.get(name, name)
        if name in ENGINES:
            kinds = PRECISIONS if ENGINES[name].int8 else PRECISIONS[:-1]
            precision = precision or "fp32"
            if precision not in kinds:
                raise LowRankError(f"{name} runs in {', '.join(kinds)}, not in {precision!r}.")
            if not ENGINES[name].installed:
                raise LowRankError(f"{name} is not installed here: pip install '.[engines]' in the clone.")
            return cls("cpu", name, precision)
        if text != "auto" and text.partition(":")[0] not in ("cpu", "cuda", "mps"):
            raise LowRankError(
                f"a network runs on cpu or cuda, or in an engine (onnxruntime:int8), not on {text!r}; "
                f"{nearest(name, ['cpu', 'cuda', *ENGINE_WORDS, *ENGINES])}"
            )
        return cls(resolve_device(device if text == "auto" else text))

    @property
    def gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def batch(self) -> int:
        """The number of images to time at once."""
        return GPU_BATCH if self.gpu else 1

    def __str__(self) -> str:
        if self.engine:
            return f"{self.engine} ({self.precision}) on this CPU"
        return torch.cuda.get_device_name(self.device) if self.gpu else f"this {self.device.upper()}"

    @property
    def suffix(self) -> str:
        return ENGINES[self.engine].suffix

    def images(self, batch: int, size: tuple[int, ...]) -> Tensor:
        """Images to time a network with; on a GPU in bf16, as networks are trained there."""
        images = torch.randn(batch, *size, generator=torch.Generator().manual_seed(0))
        if self.gpu:
            layout = torch.channels_last_3d if len(size) > 3 else torch.channels_last
            return images.to(self.device, torch.bfloat16, memory_format=layout)
        return images.to(self.device)

    def prepared(
        self, network: nn.Module, images: Tensor, folder: Path, *, known: DesignTime | None = None, **how: Any
    ) -> Optimized | Path:
        """The network as it will run on such images: optimised, or the file of an engine in a folder.

        An optimised network has the form that is `known`, if it still runs. `how` are settings of `optimize`.
        """
        network = network.to(images.device, images.dtype).eval()
        if known and known.ways is not None:
            form = {"choice": known.choice, "ways": known.ways, "times": known.tries, "input": [*images.shape]}
            if (made := reoptimize(network, form)).report.choice == known.choice:
                return made
        if not self.engine:
            return optimize(network, images, budget=self.seconds, **how)
        folder.mkdir(parents=True, exist_ok=True)
        strips = ENGINES[self.engine].strips
        return write_to_time(network, self.engine, self.precision, images, folder, strips=strips)

    def times(
        self, made: Mapping[str, Optimized | Path], images: Tensor, *, repeats: int, budget: float = 20.0
    ) -> dict[str, Sample]:
        """Milliseconds of prepared networks, in turns."""
        if self.engine:
            paths = {name: str(path) for name, path in made.items()}
            threads = torch.get_num_threads()
            asked = paths, list(images.shape), threads, threads, repeats
            return {n: Sample(*s) for n, s in apart(choose_engine.__file__, "time_files", *asked).items()}
        runs = {name: lambda one=one: one(images) for name, one in made.items()}  # type: ignore[operator]
        return measure(runs, repeats=repeats, budget=budget, cuda=images.is_cuda)

    def choice_of(self, made: Optimized | Path) -> tuple[str, dict[str, float], dict[str, str] | None]:
        """The form that was fastest, the times of all forms, and the ways of its blocks."""
        if isinstance(made, Path):
            return f"{self.engine}, {self.precision}", {}, None
        return made.chosen["choice"], made.chosen["times"], made.chosen["ways"]

    def deployed(self, trained: Trained, data: Data, folder: Path) -> Trained | None:
        """The trained network read from the file that the engine runs; None where torch runs it.

        In int8, the ranges come from the training images.
        """
        if not self.engine:
            return None
        path = folder / f"net{self.suffix}"
        if self.precision == "int8":
            quantize(trained, data, path, test=1, overwrite=True)
        else:
            how: Any = {"precision": self.precision, "strips": ENGINES[self.engine].strips}
            export(trained, path, overwrite=True, **how)
        return load_checkpoint(path, trusted=True)

    def answers(self, network: Trained, data: Data) -> Tensor:
        """Whether each test image of the data is classified correctly, in their order."""
        found = evaluate(network, data, device=self.device, progress=False)
        assert found.details is not None
        assert found.details.right is not None
        return found.details.right


@dataclass
class TimedDesigns:
    """The designs of a record by name, counted and timed; the record, which may hold more, is saved after each.

    `batch` is the number of images that are timed together; 0 times nothing. `scratch` is for files of engines.
    """

    found: Frontier
    builder: Builder
    target: Target
    say: Callable[[str], None]
    batch: int
    repeats: int
    compile: bool
    scratch: Path
    rows: dict[str, DesignRow] = field(default_factory=dict, init=False)
    reference: Optimized | Path | None = field(default=None, init=False)

    def add(self, design: Design) -> DesignTime | None:
        """Count and time a design, and return its time; one that is in the record already stays as it is."""
        row = self.found.row(design.name)
        if row is None:
            cost = self.builder.count(design)
            row = DesignRow(design, cost.macs, cost.params)
            self.found.rows.append(row)
            self.found.save()
        self.rows[design.name] = row
        if self.batch and row.timing is None:
            row.timing = self.time(design)
            self.found.save()
            ms = self.found.ms(row)  # as in the table: by its turns with the dense network
            self.say(f"{design.name}: {ms:.3f} ms, {row.macs / 1e6:.1f} M MACs ({row.timing.choice})")
        return row.timing

    def time(self, design: Design) -> DesignTime:
        """The time of a design in turns with the dense network."""
        ours = self._fresh(design)
        if self.reference is None:
            self.reference = ours if design == DENSE else self._fresh(DENSE)
        times = self.target.times({"ours": ours, "dense": self.reference}, self.images, repeats=self.repeats)
        sample = times["ours"]
        other = sample.ms if design == DENSE else times["dense"].ms  # beside itself it takes as long
        figures = sample.ms, sample.low, sample.high, other, self.batch, *self.target.choice_of(ours)
        return DesignTime(*figures, environment=self.found.here())

    @cached_property
    def images(self) -> Tensor:
        return self.target.images(self.batch, self.builder.size)

    def _fresh(self, design: Design) -> Optimized | Path:
        torch.manual_seed(0)
        return self.prepared(self.builder(design), design.name)

    def prepared(self, network: nn.Module, name: str) -> Optimized | Path:
        how = {"compile": self.compile, "repeats": self.repeats}
        return self.target.prepared(network, self.images, self.scratch / name, **how)
