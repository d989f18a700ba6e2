"""Targets by name: the suffix of each, the package it needs, and three lines that run its file by itself."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from lowrank_cnn.system.errors import LowRankError, nearest


@dataclass(frozen=True)
class Target:
    """A program that runs networks: the suffix of its files, the package it needs, and how to run `{file}`."""

    suffix: str
    package: str
    usage: str
    int8: bool = False
    strips: bool = False

    @property
    def installed(self) -> bool:
        """Whether its package can be imported."""
        return importlib.util.find_spec(self.package) is not None


_ONNX = """import onnxruntime
session = onnxruntime.InferenceSession("{file}")
logits = session.run(None, {{"{input}": images}})[0]"""
_STRIPS = """import lowrank_strips, onnxruntime
options = onnxruntime.SessionOptions(); options.register_custom_ops_library(lowrank_strips.onnxruntime_library())
logits = onnxruntime.InferenceSession("{file}", options).run(None, {{"{input}": images}})[0]"""
_OPENVINO = """import openvino
network = openvino.compile_model("{file}", "CPU", {{"INFERENCE_PRECISION_HINT": "{hint}"}})
logits = network(images)[0]"""
_NCNN = """import ncnn
net = ncnn.Net(); net.load_param("{file}"); net.load_model("{stem}.ncnn.bin")
run = net.create_extractor(); run.input("in0", ncnn.Mat(images[0])); logits = run.extract("out0")[1]"""
_MNN = """import MNN.nn, MNN.expr as F
network = MNN.nn.load_module_from_file("{file}", ["{input}"], ["{output}"])
x = F.placeholder(images.shape, F.NCHW); x.write(images); logits = network.forward([x])[0].read()"""
_EXECUTORCH = """from executorch.runtime import Runtime
method = Runtime.get().load_program("{file}").load_method("forward")
logits = method.execute([torch.from_numpy(images[:1])])[0]"""
_PROGRAM = """import torch
network = torch.export.load("{file}").module()
logits = network(torch.from_numpy(images))"""
_SCRIPT = """import torch
network = torch.jit.load("{file}")
logits = network(torch.from_numpy(images))"""

TARGETS = {
    "onnx": Target(".onnx", "onnxruntime", _ONNX, int8=True),
    "openvino": Target(".xml", "openvino", _OPENVINO, int8=True),
    "ncnn": Target(".param", "ncnn", _NCNN),
    "mnn": Target(".mnn", "MNN", _MNN),
    "executorch": Target(".pte", "executorch", _EXECUTORCH, int8=True),
    "pt2": Target(".pt2", "torch", _PROGRAM),
    "torchscript": Target(".ts", "torch", _SCRIPT),
    "onnx-strips": Target(".onnx", "lowrank_strips", _STRIPS, strips=True),
}
_ELSEWHERE = {
    "tensorrt": "TensorRT reads .onnx: export to onnx, then trtexec --onnx=net.onnx --saveEngine=net.plan.",
    "coreml": "Core ML reads TorchScript: export to torchscript, then coremltools.convert of it on a Mac.",
    "litert": "LiteRT's converter (litert-torch) has no build for Linux on Arm, and onnx2tf needs TensorFlow: "
    "export to onnx here, then run onnx2tf -i net.onnx in an environment of its own on x86.",
}
"""Targets whose converters do not run here, and the way to them."""


def target_of(name: str) -> Target:
    """A target by name; one that is reached through another says how."""
    if name in TARGETS:
        return TARGETS[name]
    raise LowRankError(_ELSEWHERE.get(name) or f"there is no target {name!r}; {nearest(name, TARGETS)}")


def usage(
    path: Path,
    *,
    precision: str = "fp32",
    strips: bool = False,
    input_name: str = "image",
    output_name: str = "output",
) -> str:
    """Three lines of Python that run a file in its own engine."""
    known = TARGETS.values()
    target = next(target for target in known if (target.suffix, target.strips) == (path.suffix, strips))
    hint = "f16" if precision == "fp16" else "f32"
    names = {"file": path.name, "stem": path.stem, "input": input_name, "output": output_name}
    return target.usage.format(hint=hint, **names)
