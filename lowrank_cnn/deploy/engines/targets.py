"""The engines by name: open a file in its engine, print three lines that run it, and write its card."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

from lowrank_cnn.core.errors import LowRankError, check_file, explained, nearest, option
from lowrank_cnn.core.files import as_path, write_atomically
from lowrank_cnn.core.text import si
from lowrank_cnn.deploy.engines.executorch import EXECUTORCH
from lowrank_cnn.deploy.engines.litert import LITERT
from lowrank_cnn.deploy.engines.mnn import MNN
from lowrank_cnn.deploy.engines.ncnn import NCNN
from lowrank_cnn.deploy.engines.onnx import ONNX, ONNX_STRIPS
from lowrank_cnn.deploy.engines.openvino import OPENVINO
from lowrank_cnn.deploy.engines.runner import Engine, Port, Runner
from lowrank_cnn.deploy.engines.torch import PROGRAM, TORCHSCRIPT

ENGINES: dict[str, Engine] = {
    "onnx": ONNX,
    "openvino": OPENVINO,
    "ncnn": NCNN,
    "mnn": MNN,
    "litert": LITERT,
    "executorch": EXECUTORCH,
    "pt2": PROGRAM,
    "torchscript": TORCHSCRIPT,
    "onnx-strips": ONNX_STRIPS,
}
"""The names that `--to` and `--engine` accept. A file is opened by the first engine with its suffix."""
PRETRAINED = "pretrained"
"""The name that `--to` accepts besides, for the folder of `save_pretrained`."""
_ELSEWHERE = {
    "tensorrt": "TensorRT reads .onnx: export to onnx, then trtexec --onnx=net.onnx --saveEngine=net.plan.",
    "coreml": "Core ML reads TorchScript: export to torchscript, then coremltools.convert of it on a Mac.",
}
"""Engines whose converters do not run here, and how to convert for them."""


def open_engine(path: str | Path, *, threads: int = 0, trusted: bool = False) -> Runner:
    """A network's file, ready to run on the CPU, in the engine that its suffix names.

    - `threads`: how many the engine may use; 0 leaves that to the engine.
    - `trusted`: needed for .pt2 and .ts, which torch reads by running code stored in them.

    >>> runner = open_engine("net.onnx")  # doctest: +SKIP
    >>> runner({"image": pixels})["output"].shape  # doctest: +SKIP
    (1, 10)
    """
    path = as_path(path)
    engine = engine_of(path)
    check_file(path)
    if engine.trusted and not trusted:
        raise LowRankError(
            f"reading {path.name} can run code stored in it: say {option('trusted', True)} for a file of your own."
        )
    with explained(f"{engine.runner.engine} cannot read {path}"):
        return engine.runner(path, threads=threads)


def engine_of(path: Path, *, strips: bool = False) -> Engine:
    """The engine that runs a file, by its suffix."""
    for engine in ENGINES.values():
        if (engine.suffix, engine.strips) == (path.suffix, strips):
            return engine
    raise LowRankError(f"no engine runs {path.name}: its name must end in one of {', '.join(suffixes())}.")


def suffixes(*, int8: bool = False) -> list[str]:
    """The suffixes of all engines, or of those that run int8."""
    return list(dict.fromkeys(engine.suffix for engine in ENGINES.values() if engine.int8 or not int8))


def target_of(name: str) -> Engine:
    """An engine by name; the error for an indirect target says how to convert."""
    if name in ENGINES:
        return ENGINES[name]
    known = nearest(name, [*ENGINES, PRETRAINED])
    raise LowRankError(_ELSEWHERE.get(name) or f"there is no target {name!r}; {known}")


def usage(runner: Runner, path: str | Path, *, precision: str = "fp32") -> str:
    """Three lines of Python that run a file without this library, on random numbers instead of prepared images.

    An engine's lines may use these words. {made} makes the inputs. {given}, {named} and {called} are the inputs by
    position, as a dictionary, and as arguments of a call. {names} and {output} are names in the file.
    """
    engine = engine_of(Path(path), strips="strips" in runner.metadata)
    in_torch = engine.package in ("torch", "executorch")
    names = [port.name for port in runner.inputs]
    keywords = getattr(runner, "keywords", ())
    variables = ["images"] if len(names) == 1 else [f"input{place}" for place in range(len(names))]
    pairs = list(zip(variables, names, strict=True))
    return engine.usage.format(
        made="; ".join(f"{v} = {_random(p, in_torch)}" for v, p in zip(variables, runner.inputs, strict=True)),
        file=_quoted(path),
        weights=_quoted(Path(path).with_suffix(".ncnn.bin")),
        given=", ".join(variables),
        named=", ".join(f"{_quoted(name)}: {variable}" for variable, name in pairs),
        names=", ".join(_quoted(name) for name in names),
        called=", ".join(f"{name}={variable}" if name in keywords else variable for variable, name in pairs),
        fed="; ".join(f'run.input("in{n}", ncnn.Mat({variable}[0]))' for n, variable in enumerate(variables)),
        output=_quoted(runner.outputs[0].name),
        mode=engine.modes[precision == "fp16"],
    )


def _random(port: Port, in_torch: bool) -> str:
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


def write_export_card(
    path: Path, name: str, *, macs: int, error: float | None, precision: str, accuracy: str = ""
) -> Path:
    """Write FILE.md next to an exported file: its network, inputs and error, and how to run it."""
    runner, version = open_engine(path, trusted=True), importlib.metadata.version(engine_of(path).package)
    card = path.with_name(f"{path.name}.md")
    lines = [f"# {name}, {precision}, for {runner.engine} {version}", ""]
    lines += [f"- {si(macs)} multiply-accumulates an image"]
    for verb, ports in (("takes", runner.inputs), ("gives", runner.outputs)):
        lines += [f"- {verb} " + "; ".join(f"{port.name} of {port} in {port.dtype}" for port in ports)]
    lines += [f"- differs from the network in torch by {error:.1e} of the largest output at most"] if error else []
    lines += [f"- {accuracy}"] if accuracy else []
    for key, words in (("mean", "subtract the mean"), ("std", "divide by the deviation"), ("classes", "classes")):
        if value := runner.metadata.get(key):
            lines.append(f"- {words}: {', '.join(map(str, json.loads(value)))}")
    lines += ["", "```python", usage(runner, path.name, precision=precision), "```", ""]
    write_atomically(card, "\n".join(lines).encode())
    return card
