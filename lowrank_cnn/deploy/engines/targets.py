"""Targets by name: the suffix of each, the package it needs, and three lines that run its file by itself."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from lowrank_cnn.core.errors import LowRankError, nearest
from lowrank_cnn.core.files import as_path, write_atomically
from lowrank_cnn.core.text import si
from lowrank_cnn.deploy.engines.runner import Port, Runner

# Networks in the files of other programs: write one, and run it there. Each engine is one module and one row.

__all__ = ["ENGINES", "TRUSTED", "Port", "Runner", "open_engine"]

ENGINES = {
    ".onnx": ("onnx", "OnnxRunner", "write_onnx"),
    ".pt2": ("program", "ProgramRunner", "write_program"),
    ".ts": ("torchscript", "ScriptRunner", "write_script"),
    ".xml": ("openvino", "OpenVinoRunner", "write_openvino"),
    ".param": ("ncnn", "NcnnRunner", "write_ncnn"),
    ".mnn": ("mnn", "MnnRunner", "write_mnn"),
    ".tflite": ("litert", "LitertRunner", "write_litert"),
    ".pte": ("executorch", "ExecuTorchRunner", "write_executorch"),
}
"""By suffix: the module here, its runner, and the function that writes such a file."""
TRUSTED = (".pt2", ".ts")
"""Files whose reading can run code stored in them."""


def open_engine(path: str | Path, *, threads: int = 0, trusted: bool = False) -> Runner:
    """A network's file, ready to run on the CPU, in the engine that its suffix names.

    - `threads`: how many the engine may use; 0 leaves that to the engine.
    - `trusted`: needed for .pt2 and .ts, which torch reads by running code stored in them.

    >>> runner = open_engine("net.onnx")  # doctest: +SKIP
    >>> runner({"image": pixels})["output"].shape  # doctest: +SKIP
    (1, 10)
    """
    path = as_path(path)
    module, runner, _ = engine_of(path)
    if not path.is_file():
        raise LowRankError(f"there is no file {path}.")
    check_trusted(path, trusted)
    made = getattr(importlib.import_module(f"{__package__}.{module}"), runner)
    return made(path, threads=threads)


def is_engine_file(path: str | Path) -> bool:
    """Whether a path is that of a file which an engine runs, by its suffix."""
    return Path(path).suffix in ENGINES


def engine_of(path: Path) -> tuple[str, str, str]:
    """The row of `ENGINES` for a file."""
    if path.suffix not in ENGINES:
        known = ", ".join(ENGINES)
        raise LowRankError(f"no engine runs {path.name}: its name must end in one of {known}.")
    return ENGINES[path.suffix]


def check_trusted(path: Path, trusted: bool) -> None:
    """Refuse a file that could run code of its own, unless the user trusts it."""
    if path.suffix in TRUSTED and not trusted:
        raise LowRankError(
            f"reading {path.name} can run code stored in it: say trusted=True (--trusted) for a file of your own."
        )


@dataclass(frozen=True)
class Target:
    """A program that runs networks: the suffix of its files, the package it needs, and how to run one."""

    suffix: str
    package: str
    usage: str
    int8: bool = False
    strips: bool = False
    writer: str = ""
    """A second package, which writes its files."""

    @property
    def installed(self) -> bool:
        """Whether its packages can be imported."""
        return all(importlib.util.find_spec(name) for name in (self.package, self.writer) if name)


_ONNX = """import numpy, onnxruntime; {made}
session = onnxruntime.InferenceSession({file})
logits = session.run(None, {{{named}}})[0]"""
_STRIPS = """import numpy, lowrank_strips, onnxruntime; {made}
options = onnxruntime.SessionOptions(); options.register_custom_ops_library(lowrank_strips.onnxruntime_library())
logits = onnxruntime.InferenceSession({file}, options).run(None, {{{named}}})[0]"""
_OPENVINO = """import numpy, openvino; {made}
network = openvino.compile_model({file}, "CPU", {{"INFERENCE_PRECISION_HINT": "{hint}"}})
logits = network([{given}])[0]"""
_NCNN = """import numpy, ncnn; {made}; net = ncnn.Net(){single}
net.load_param({file}); net.load_model({weights})
run = net.create_extractor(); {fed}; logits = run.extract("out0")[1]"""
_MNN = """import numpy, MNN.nn, MNN.expr as F; {made}
run = MNN.nn.create_runtime_manager(({{"precision": "{mode}"}},)); \
network = MNN.nn.load_module_from_file({file}, [{names}], [{output}], runtime_manager=run)
result = F.convert(network.forward([F.const(x, x.shape, F.NCHW) for x in [{given}]])[0], F.NCHW)
logits = result.read().copy()  # an array shows memory of the result"""
_EXECUTORCH = """import torch; from executorch.runtime import Runtime; {made}
method = Runtime.get().load_program({file}).load_method("forward")
logits = method.execute([{given}])[0]"""
_LITERT = """import numpy; from ai_edge_litert.interpreter import Interpreter; {made}
network = Interpreter({file}).get_signature_runner()
logits = network(**{{{named}}})[{output}]"""
_PROGRAM = """import torch; {made}
network = torch.export.load({file}).module()
with torch.no_grad(): logits = network({called})"""
_SCRIPT = """import torch; {made}
network = torch.jit.load({file})
with torch.no_grad(): logits = network({given})"""
_IN_SINGLE = "; net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False"
"""ncnn computes in half precision wherever it can, unless it is told not to."""

TARGETS = {
    "onnx": Target(".onnx", "onnxruntime", _ONNX, int8=True),
    "openvino": Target(".xml", "openvino", _OPENVINO, int8=True),
    "ncnn": Target(".param", "ncnn", _NCNN),
    "mnn": Target(".mnn", "MNN", _MNN),
    "litert": Target(".tflite", "ai_edge_litert", _LITERT, int8=True, writer="onnx_tflite"),
    "executorch": Target(".pte", "executorch", _EXECUTORCH, int8=True),
    "pt2": Target(".pt2", "torch", _PROGRAM),
    "torchscript": Target(".ts", "torch", _SCRIPT),
    "onnx-strips": Target(".onnx", "lowrank_strips", _STRIPS, strips=True),
}
_ELSEWHERE = {
    "tensorrt": "TensorRT reads .onnx: export to onnx, then trtexec --onnx=net.onnx --saveEngine=net.plan.",
    "coreml": "Core ML reads TorchScript: export to torchscript, then coremltools.convert of it on a Mac.",
}
"""Targets whose converters do not run here, and the way to them."""


def target_of(name: str) -> Target:
    """A target by name; one that is reached through another says how."""
    if name in TARGETS:
        return TARGETS[name]
    raise LowRankError(_ELSEWHERE.get(name) or f"there is no target {name!r}; {nearest(name, TARGETS)}")


def usage(runner: Runner, path: str | Path, *, precision: str = "fp32") -> str:
    """Three lines of Python that run a file by itself, on random numbers in place of prepared images."""
    target = _target_of_file(runner, Path(path))
    torch_runs = target.package in ("torch", "executorch")
    ports = runner.inputs
    variables = ["images"] if len(ports) == 1 else [f"input{place}" for place in range(len(ports))]
    made = "; ".join(
        f"{v} = {_random(port, in_torch=torch_runs)}" for v, port in zip(variables, ports, strict=True)
    )
    pairs = list(zip(variables, (port.name for port in ports), strict=True))
    keywords = getattr(runner, "keywords", ())
    half = precision == "fp16"
    return target.usage.format(
        made=made,
        file=_quoted(path),
        weights=_quoted(Path(path).with_suffix(".ncnn.bin")),
        given=", ".join(variables),
        named=", ".join(f"{_quoted(name)}: {variable}" for variable, name in pairs),
        names=", ".join(_quoted(name) for _, name in pairs),
        called=", ".join(f"{name}={variable}" if name in keywords else variable for variable, name in pairs),
        fed="; ".join(f'run.input("in{n}", ncnn.Mat({variable}[0]))' for n, variable in enumerate(variables)),
        output=_quoted(runner.outputs[0].name),
        hint="f16" if half else "f32",
        mode="low" if half else "high",
        single="" if half else _IN_SINGLE,
    )


def _target_of_file(runner: Runner, path: Path) -> Target:
    strips = "strips" in runner.metadata
    return next(each for each in TARGETS.values() if (each.suffix, each.strips) == (path.suffix, strips))


def _random(port: Port, *, in_torch: bool) -> str:
    """An array or tensor of one image, in Python."""
    sizes = [size if isinstance(size, int) else 224 if axis > 1 else 1 for axis, size in enumerate(port.shape)]
    shape = ", ".join(map(str, sizes))
    if in_torch:
        kind = f", dtype=torch.{port.dtype}" if port.dtype != "float32" else ""
        return f"torch.rand({shape}{kind})" if "float" in port.dtype else f"torch.zeros({shape}{kind})"
    if "float" in port.array_dtype:
        return f'numpy.random.rand({shape}).astype("{port.array_dtype}")'
    return f'numpy.zeros(({shape},), "{port.array_dtype}")'


def _quoted(text: str | Path) -> str:
    return json.dumps(str(text), ensure_ascii=False)


# The card beside an exported network: what it is, what it takes, how exact it is, and how to run it.


def write_export_card(
    path: Path, name: str, *, macs: int, error: float | None, precision: str, accuracy: str = ""
) -> Path:
    """Write FILE.md beside a file that was exported just now."""
    runner = open_engine(path, trusted=True)
    card = path.with_name(f"{path.name}.md")
    lines = [f"# {name}, {precision}, for {runner.engine} {_version(path)}", ""]
    lines += [f"- {si(macs)} multiply-accumulates an image"]
    lines += [f"- takes {_ports(runner.inputs)}", f"- gives {_ports(runner.outputs)}"]
    lines += [f"- differs from the network in torch by {error:.1e} of the largest output at most"] if error else []
    lines += [f"- {accuracy}"] if accuracy else []
    lines += _preparation(runner)
    lines += ["", "```python", usage(runner, path.name, precision=precision), "```", ""]
    write_atomically(card, "\n".join(lines).encode())
    return card


def _preparation(runner: Runner) -> list[str]:
    """How images are prepared and what the outputs are called, as far as the file tells."""
    found = []
    for key, words in (("mean", "subtract the mean"), ("std", "divide by the deviation"), ("classes", "classes")):
        if value := runner.metadata.get(key):
            found.append(f"- {words}: {', '.join(map(str, json.loads(value)))}")
    return found


def _ports(ports: tuple[object, ...]) -> str:
    return "; ".join(f"{port.name} of {port} in {port.dtype}" for port in ports)  # type: ignore[attr-defined]


def _version(path: Path) -> str:
    package = next(target.package for target in TARGETS.values() if target.suffix == path.suffix)
    return importlib.metadata.version(package)
