"""A file as a module: fixed batches run in turns, outputs have names, pixels are told from prepared images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.runner import Port, Runner
from lowrank_cnn.deploy.parity import EngineModel, as_pixels


class Doubling(Runner):
    """An engine that doubles its input, and says how often it ran."""

    engine = "test"

    def __init__(self, batch: int | str, *, outputs: int = 1, whole: bool = False) -> None:
        self.inputs = (Port("image", (batch, 2, 3)),)
        self.outputs = tuple(Port(f"out{n}", (batch, 2, 3)) for n in range(outputs))
        self.metadata, self.runs, self.whole = {}, 0, whole

    def _run(self, inputs):
        self.runs += 1
        found = 2 * inputs["image"]
        return {port.name: found.sum(0) if self.whole else found for port in self.outputs}


def images(batch: int) -> Tensor:
    return torch.arange(6.0 * batch).view(batch, 2, 3)


@pytest.mark.parametrize(("batch", "given", "runs"), [(2, 5, 3), (1, 3, 3), (4, 4, 1), ("batch", 5, 1)])
def test_a_fixed_batch_runs_as_often_as_it_takes(batch: int | str, given: int, runs: int):
    runner = Doubling(batch)
    assert torch.equal(EngineModel(runner)(images(given)), 2 * images(given))
    assert runner.runs == runs


def test_a_sum_over_the_batch_is_not_put_together():
    with pytest.raises(LowRankError, match="4 images at a time, not 3"):
        EngineModel(Doubling(4, whole=True))(images(3))


def test_several_outputs_have_names():
    found = EngineModel(Doubling("batch", outputs=2))(image=images(2))
    assert list(found) == ["out0", "out1"]
    with pytest.raises(LowRankError, match="takes image, not other"):
        EngineModel(Doubling("batch"))(other=images(2))


def test_an_error_of_the_engine_is_one_sentence():
    runner = Doubling("batch")
    runner._run = lambda inputs: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(LowRankError, match="test cannot run this file: division by zero"):
        EngineModel(runner)(images(1))


def test_pixels_are_told_from_prepared_images():
    pixels = torch.tensor([[[[0.0, 255.0], [17.4, 100.0]]]])
    assert as_pixels(pixels, nhwc=True).tolist() == [[[[0], [255]], [[17], [100]]]]
    for wrong in (pixels - 120, pixels * 2, pixels / 255, pixels * float("nan")):
        with pytest.raises(LowRankError, match="pixel values of 0 to 255"):
            as_pixels(wrong, nhwc=False)


@pytest.mark.parametrize(
    ("inputs", "says"), [((), "takes no input"), ((Port("text", ("batch",), "string"),), "text in string")]
)
def test_a_file_of_others_that_takes_no_tensors_is_refused(inputs: tuple[Port, ...], says: str):
    runner = Doubling("batch")
    runner.inputs = inputs
    with pytest.raises(LowRankError, match=says):
        EngineModel(runner)


def test_a_file_cannot_ask_for_much_memory_by_its_batch():
    with pytest.raises(LowRankError, match="image of 1073741824x2x3, not of 1x2x3"):
        EngineModel(Doubling(2**30))(images(1))
    with pytest.raises(LowRankError, match="image of 1000x2x3, not images of 2x4"):
        EngineModel(Doubling(1000))(torch.zeros(1, 2, 4))
