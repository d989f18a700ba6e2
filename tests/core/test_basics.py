"""Sentences for users, numbers and tables as a person reads them, statistics, and what describes a machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lowrank_cnn
from lowrank_cnn.core import errors
from lowrank_cnn.core.environment import commit, environment, is_out_of_memory
from lowrank_cnn.core.errors import LowRankError, MissingExtra, missing_extra, require
from lowrank_cnn.core.numbers import (
    accuracy,
    deviation,
    holm,
    mean,
    mean_interval,
    pearson,
    pooled_deviation,
    student_p,
    student_t,
    wilson,
)
from lowrank_cnn.core.processes import apart
from lowrank_cnn.core.text import counted, duration, printable, si, text_table

ROOT = Path(__file__).parents[2]


def test_a_missing_package_is_named_with_its_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    for module, extra, missing in (
        ("no_such_thing.inside", "plots", "no_such_thing"),
        ("torch.utils.tensorboard", "train", "tensorboard"),  # what the module itself lacks
    ):
        told = rf"^drawing needs {missing}: pip install '\.\[{extra}\]'$"
        with pytest.raises(MissingExtra, match=told):
            require(module, extra=extra, purpose="drawing")
    assert require("json", extra="plots").dumps([]) == "[]"


def test_an_accuracy_on_few_images_has_an_interval():
    assert [round(end, 4) for end in wilson(0.5, 10)] == [0.2366, 0.7634]  # Wilson's, as statsmodels gives it
    assert (accuracy(1.0, 20), accuracy(0.0, 20)) == ("100.00% (83.9 to 100.0)", "0.00% (0.0 to 16.1)")
    assert (accuracy(0.912, 4999), accuracy(0.912, 5000)) == ("91.20% (90.4 to 92.0)", "91.20%")


@pytest.mark.parametrize(
    ("folder", "record", "told"),
    [
        ("clone", None, "'CLONE[zoo]'"),  # from elsewhere; within the clone it is '.[zoo]', as above
        ("site-packages", {"url": "file://CLONE", "dir_info": {}}, "'CLONE[zoo]'"),  # pip install CLONE
        ("site-packages", {"url": "file:///gone"}, "'lowrank-cnn[zoo]'"),
        ("site-packages", None, "'lowrank-cnn[zoo]'"),  # from an index
    ],
)
def test_a_missing_package_is_installed_from_where_ours_came(tmp_path, monkeypatch, folder, record, told):
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    monkeypatch.setattr(errors, "__file__", str(tmp_path / folder / "lowrank_cnn" / "core" / "errors.py"))
    text = record and json.dumps(record).replace("CLONE", str(clone))
    found = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)
    assert str(missing_extra("this", "timm", "zoo")) == f"this needs timm: pip install {told}".replace(
        "CLONE", str(clone)
    )


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
    variables = {**kept, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", RUN_ENGINES], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("shown", "right"),
    [
        ([si(7508438696), si(999), si(1e12), si(0.5)], ["7.51G", "999", "1.00T", "0.5"]),
        ([duration(seconds) for seconds in (3, 12.54, 600, 7200)], ["3 s", "12.5 s", "10.0 min", "2.0 h"]),
        ([counted(n, "run") for n in (0, 1, 12345)], ["0 runs", "1 run", "12,345 runs"]),
        ([counted(2, noun) for noun in ("class", "batch", "epoch")], ["2 classes", "2 batches", "2 epochs"]),
        (text_table(["a", ">n"], [["long", 1], ["b", 22]]), "a      n\nlong   1\nb     22"),
    ],
)
def test_numbers_and_tables_are_for_people(shown, right):
    assert shown == right


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\u00e9l\u00e8ve, \u732b, \U0001f408", "\u00e9l\u00e8ve, \u732b, \U0001f408"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("\x9b2J\r\x08", "\\x9b2J\\r\\x08"),
        ("\u202egpj.tac", "\\u202egpj.tac"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_characters_are_shown_as_escapes(text, shown):
    assert printable(text) == shown
    assert str(LowRankError(text)) == shown.replace("\n", "\\n")


def test_corrections_intervals_and_correlations_are_those_of_the_textbook():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert (holm([0.9, 0.8]), holm([])) == ([1.0, 1.0], [])
    table = {1: 12.706, 2: 4.303, 3: 3.182, 7: 2.365, 30: 2.042}
    assert [student_t(0.975, n) for n in table] == pytest.approx(list(table.values()), abs=0.0005)
    assert student_p(student_t(0.975, 5), 5) == pytest.approx(0.975)
    centre, low, high = mean_interval([1.0, 2.0, 3.0])
    assert (centre, high - centre, centre - low) == pytest.approx((2.0, *2 * [4.303 / 3**0.5]), abs=1e-3)
    assert mean_interval([5.0]) == (5.0, 5.0, 5.0)
    assert (mean([]), mean([1.0, 2.0]), deviation([1.0])) == (None, 1.5, None)
    assert deviation([1.0, 3.0]) == pytest.approx(2**0.5)
    assert (pearson([1], [1]), pearson([1, 1, 1], [1, 2, 3])) == (None, None)
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), max_size=5))
def test_pooled_deviation_lies_between_those_of_the_networks(runs):
    pooled, freedom = pooled_deviation(runs)
    alone = [stdev(values) for values in runs if len(values) > 1]
    assert freedom == sum(len(values) - 1 for values in runs)
    assert (pooled is None) == (not alone)
    assert pooled is None or min(alone) - 1e-9 <= pooled <= max(alone) + 1e-9


def test_a_figure_says_what_it_was_measured_with(monkeypatch, tmp_path):
    described = environment()
    assert (described["torch"], described["lowrank_cnn"]) == (torch.__version__, lowrank_cnn.__version__)
    assert described["cpu"]
    assert json.loads(json.dumps(described)) == described
    monkeypatch.setenv("LOWRANK_COMMIT", "abc123")  # of a tree without history
    assert commit() == "abc123"


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 99 bytes"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("unable to mmap 99 bytes from file <a>: Cannot allocate memory (12)"), True),
        (RuntimeError("std::bad_alloc"), True),
        (MemoryError(), True),
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_errors_of_an_allocator_are_known_on_any_device(error: Exception, known: bool):
    assert is_out_of_memory(error) is known


OWN = """
import os

def add(a, b):
    os.write(1, b"an engine prints about itself")
    return a + b, os.getpid()

def fail():
    raise ValueError("no such layer")

def die():
    os._exit(3)
"""


def test_a_function_of_a_file_is_called_in_a_process_of_its_own(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    (added, process), (_, another) = apart(str(file), "add", [1], [2]), apart(str(file), "add", 1, 2)
    assert added == [1, 2]
    assert len({process, another, os.getpid()}) == 3
    for function, told in {"fail": "no such layer", "die": "without a result .exit status 3"}.items():
        with pytest.raises(LowRankError, match=told):
            apart(str(file), function)
