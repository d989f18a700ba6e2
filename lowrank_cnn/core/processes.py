"""The rank of this process under torchrun, and functions called in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from lowrank_cnn.core.errors import LowRankError

_CALL = """
import importlib.util, json, os, sys
sys.path[:], file, function, asked = json.load(sys.stdin)
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # compiled code prints about itself
try:
    spec = importlib.util.spec_from_file_location("apart", file)
    sys.modules["apart"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    told = [getattr(module, function)(*asked), ""]
except Exception as error:
    told = [None, str(error) or type(error).__name__]
json.dump(told, answer)
answer.flush()
os._exit(0)  # some engines crash when they are unloaded
"""


def first_process() -> bool:
    """Whether this process prints and writes for all that torchrun started; True without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def apart(file: str, function: str, *asked: Any) -> Any:
    """Call a function of a Python file in a process of its own. Arguments and result are values of JSON.

    Its output is dropped. If it fails, or ends the process, this raises LowRankError.
    """
    call, given = [sys.executable, "-P", "-c", _CALL], json.dumps([sys.path, file, function, asked]).encode()
    done = subprocess.run(call, input=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        result, failed = json.loads(done.stdout)
    except ValueError:
        raise LowRankError(f"its process ended without a result (exit status {done.returncode})") from None
    if failed:
        raise LowRankError(failed)
    return result
