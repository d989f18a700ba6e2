"""What a user sees before anything runs: the import, its needs, and the names it gives."""

import subprocess
import sys

import lowrank_cnn

BLOCKED = ["pyarrow", "PIL", "lightning_fabric", "tensorboard", "huggingface_hub", "mlxtend", "matplotlib", "onnx"]
BLOCKED += ["onnxruntime", "triton", "typer", "rich", "safetensors", "scipy"]

IMPORT_BARE = """
import sys
for name in {blocked}:
    sys.modules[name] = None
import lowrank_cnn as lr
net = lr.create_model("nin-c3-lr")
print(lr.count(net, (3, 30, 30)).macs)
"""


def test_importing_needs_torch_alone():
    code = IMPORT_BARE.format(blocked=BLOCKED)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "104260224", done.stderr


def test_every_public_name_is_there():
    for name in lowrank_cnn.__all__:
        assert getattr(lowrank_cnn, name) is not None
    assert set(lowrank_cnn._LATER) <= set(lowrank_cnn.__all__)


def test_a_function_stays_one_after_its_modules_were_imported():
    code = "import lowrank_cnn.cli.train, lowrank_cnn.cli.deploy, lowrank_cnn.report, lowrank_cnn as lr\n"
    code += "print([n for n in lr.__all__ if n[0].islower() and not callable(getattr(lr, n))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
