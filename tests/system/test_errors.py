import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowrank_cnn.core.errors import MissingExtra, nearest, require


def test_a_missing_extra_names_the_install():
    with pytest.raises(MissingExtra, match=r"^drawing needs no_such_thing: pip install 'lowrank-cnn\[plots\]'$"):
        require("no_such_thing.inside", extra="plots", purpose="drawing")


def test_what_the_module_itself_misses_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(MissingExtra, match=r"^charts needs tensorboard: pip install 'lowrank-cnn\[train\]'$"):
        require("torch.utils.tensorboard", extra="train", purpose="charts")


def test_an_extra_that_is_there_is_imported():
    assert require("json", extra="plots").dumps([]) == "[]"


def test_nearest_names_the_near_or_all():
    assert nearest("separabel", ["separable", "lr"]) == "did you mean separable?"
    assert nearest("zzz", ["b", "a"]) == "known are a, b."


RUN_ENGINES = """
import socket
looked_up = []
socket.getaddrinfo = lambda host, *_, **__: looked_up.append(host)
from lowrank_cnn.core.errors import require
runtime, openvino = (require(name, extra="engines") for name in ("onnxruntime", "openvino"))
import openvino.tools.ovc
from onnx import TensorProto, helper
ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", ports[:1], ports[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()
runtime.InferenceSession(model).run(None, {"x": [1.0]})
openvino.Core().read_model(model)
assert not looked_up, looked_up
"""


def test_engines_send_nothing_and_write_no_identifier(tmp_path):
    for name in ("onnx", "onnxruntime", "openvino"):
        pytest.importorskip(name)
    quiet = ("CI", "TF_BUILD", "JENKINS_URL", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")  # off, or elsewhere
    kept = {name: value for name, value in os.environ.items() if name not in quiet}
    root = str(Path(__file__).parents[2])
    environment = {**kept, "HOME": str(tmp_path), "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", RUN_ENGINES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*"))
