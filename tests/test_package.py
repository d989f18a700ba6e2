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
