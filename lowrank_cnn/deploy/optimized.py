"""A network in the form that `optimize` found fastest: laid out, compiled, recorded, or as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.examples import in_order
from lowrank_cnn.kernels.cuda_graph import Recorded, recorded
from lowrank_cnn.kernels.network_graph import has_hooks
from lowrank_cnn.system.clock import Sample
from lowrank_cnn.system.compare import copied, unchanged
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import note

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class OptimizeReport:
    """Every variant's time, those that were left out with the reason, and the name of the fastest."""

    choice: str
    times: dict[str, Sample]
    failed: dict[str, str]

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)


@dataclass(frozen=True)
class Form:
    """How a network is run: in which memory format (None: as inputs come), compiled, recorded as a CUDA graph."""

    layout: str | None = None
    compiled: bool = False
    recorded: bool = False

    def laid_out(self, *inputs: Any) -> tuple[Any, ...]:
        """Inputs in the memory format of the network; one that is no batch of images stays as it is."""
        return tuple(map(self._in_format, inputs))

    def _in_format(self, x: Any) -> Any:
        if self.layout is None or not isinstance(x, Tensor) or x.dim() != 4:
            return x
        return x.contiguous(memory_format=FORMATS[self.layout])


class Optimized(nn.Module):
    """A network for inference in its fastest form; inputs are brought into its memory format.

    It is called as the example was given: with one input, with several, or by the keywords `names`.
    Where it was recorded, inputs of that size replay a CUDA graph, without launches; others run kernel by kernel.
    Where it was compiled, `network` is still the module that was compiled: a tracer and an export see it.
    `chosen` has what `optimize` found in values that JSON can hold.
    """

    report: OptimizeReport
    given: nn.Module | None
    example: tuple[Tensor, ...]
    chosen: dict[str, Any]

    def __init__(self, network: nn.Module, form: Form, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.network, self.form, self.names = network, form, names
        self.recording: Recorded | None = None
        self.__dict__["given"] = None  # known, but no part: it would have all weights once more
        self._compiled_run: Callable[..., Any] | None = None
        note(self, optimized=True)
        self.eval()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The network's results. A recorded run skips what torch does around a forward: it would take as long."""
        recording = self.recording
        if recording is None or len(args) != 1 or kwargs or has_hooks(self) or not recording.takes(args[0]):
            return super().__call__(*args, **kwargs)
        return recording(args[0])

    @torch.no_grad()
    def forward(self, x: Any = None, *more: Any, **named: Any) -> Any:
        inputs = in_order(self.names, named) if named else (x, *more)
        if self.recording is not None and len(inputs) == 1 and self.recording.takes(*inputs):
            return self.recording(*inputs)
        return self._run(*self.form.laid_out(*inputs))

    def prepare(self, *inputs: Tensor) -> Optimized:
        """Compile and record it for inputs like these, so that it fails here if it does."""
        inputs = copied(*inputs)
        with unchanged(self.network):
            self(*inputs)
            if self.form.recorded:
                if len(inputs) > 1:
                    raise LowRankError("a CUDA graph is recorded for networks of one input.")
                with torch.inference_mode(False), torch.no_grad():
                    self.recording = recorded(self._run, *self.form.laid_out(*inputs))
        return self

    def remember(self, given: nn.Module, inputs: tuple[Tensor, ...], chosen: Mapping[str, Any]) -> None:
        """Keep the network and the inputs that it was made for, and what was chosen: `export` writes these."""
        self.__dict__.update(given=given, example=inputs, chosen=dict(chosen))

    def _run(self, *inputs: Any) -> Any:
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
        return self.network(*inputs) if traced or not self.form.compiled else self._through_compiler(*inputs)

    def _through_compiler(self, *inputs: Any) -> Any:
        """Compiled with its weights as constants, which the compiler folds and lays out ahead."""
        if self._compiled_run is None:
            # Known, but no part: torch makes a module of it, which would have all weights once more.
            self.__dict__["_compiled_run"] = torch.compile(_function_of(self.network), dynamic=False)
        assert self._compiled_run is not None
        import torch._inductor.config as inductor

        with inductor.patch(freezing=True):  # a size that is new compiles here
            return self._compiled_run(*inputs)

    # A graph is bound to its memory, and compiled code holds weights. Copies start anew. Where weights move or are
    # loaded, the network runs as it is: torch would find the compiled code of the old ones again.
    def forget(self) -> None:
        """Run the network as it is from now on, neither compiled nor recorded."""
        self.recording, self.form, self.__dict__["given"] = None, Form(self.form.layout), None
        self.__dict__["_compiled_run"] = None

    def _weights(self) -> list[tuple[int, torch.dtype, torch.device]]:
        tensors = (*self.parameters(), *self.buffers())
        return [(tensor.data_ptr(), tensor.dtype, tensor.device) for tensor in tensors]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "recording": None, "_compiled_run": None, "given": None}

    def _apply(self, fn: Any, recurse: bool = True) -> Optimized:
        before = self._weights()
        super()._apply(fn, recurse)
        if self._weights() != before:
            self.forget()
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights; from then on the network runs as it is, neither compiled nor recorded."""
        self.forget()
        return super().load_state_dict(*args, **kwargs)


def stop_compiler() -> None:
    """Cancel what waits for Inductor's threads once a compilation is stopped: it would disturb what is timed."""
    inductor: Any = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:
        with suppress(Exception):  # no threads, or another version's
            inductor.AsyncCompile.pool().shutdown(wait=False, cancel_futures=True)
            inductor.AsyncCompile.pool.cache_clear()


def _function_of(network: nn.Module) -> Callable[..., Any]:
    """A call of the network as a function with code of its own.

    Torch keeps at most eight compilations per piece of code, and then runs it as it is. Networks of one class
    share the code of their forward, and would use these up.
    """

    def run(*inputs: Any) -> Any:
        return network(*inputs)

    code = run.__code__.replace(co_name=f"optimized_{id(network)}")
    return FunctionType(code, run.__globals__, run.__name__, run.__defaults__, run.__closure__)
