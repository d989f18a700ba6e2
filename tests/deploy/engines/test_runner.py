"""What every engine has in common: inputs are checked by name, shape and type; metadata is read whatever it is."""

from pathlib import Path

import numpy as np
import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.runner import Port, Runner, parse_metadata, ports_from, read_beside, write_beside
from lowrank_cnn.deploy.engines.targets import engine_of, is_engine_file, open_engine


class Same(Runner):
    engine = "test"

    def __init__(self) -> None:
        self.inputs, self.outputs, self.metadata = (Port("a", ("batch", 2)), Port("b", (1,), "bfloat16")), (), {}

    def _run(self, inputs):
        return inputs


def test_inputs_are_checked_by_name_shape_and_type():
    run, a, b = Same(), np.zeros((3, 2), "float32"), np.zeros(1, "float32")
    assert list(run({"b": b, "a": a})) == ["b", "a"]
    for inputs, says in [
        ({"a": a}, "takes a, b, not a"),
        ({"a": a.T, "b": b}, "a of batchx2, not of 2x3"),
        ({"a": a.astype("float64"), "b": b}, "a in float32, not in float64"),
    ]:
        with pytest.raises(LowRankError, match=says):
            run(inputs)


def test_metadata_beside_a_file_is_read_back(tmp_path: Path):
    write_beside(tmp_path / "net.param", {"classes": '["a"]'})
    assert (tmp_path / "net.param.json").is_file()
    assert read_beside(tmp_path / "net.param") == {"classes": '["a"]'}
    assert read_beside(tmp_path / "other.param") == {}


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, b"\xff", "3"])
def test_damaged_metadata_counts_as_none(text: str | bytes):
    assert parse_metadata(text) == {}


def test_ports_are_read_from_json_or_not_at_all():
    assert ports_from('[{"name": "a", "shape": ["batch", 2], "dtype": "uint8"}]') == (
        Port("a", ("batch", 2), "uint8"),
    )
    for text in (None, "3", '[{"name": "a"}]', '{"a": 1}'):
        assert ports_from(text) == ()


def test_a_file_without_an_engine_is_refused(tmp_path: Path):
    assert is_engine_file("net.onnx")
    assert not is_engine_file("net.safetensors")
    with pytest.raises(LowRankError, match="must end in one of"):
        engine_of(Path("net.bin"))
    with pytest.raises(LowRankError, match="there is no file"):
        open_engine(tmp_path / "net.onnx")
