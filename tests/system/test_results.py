"""Results are looked into, whatever containers a network puts its tensors in."""

from collections import namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from lowrank_cnn.core.compare import agree, difference, flattened, mapped, tensors_of, tolerance

ONE, TWO = torch.ones(2), torch.full((3,), 2.0)
Pair = namedtuple("Pair", "first second")


@dataclass
class Maps:
    logits: torch.Tensor
    more: list = field(default_factory=list)
    loss: float | None = None


@dataclass(frozen=True)
class Frozen:
    maps: Maps


RESULTS = [
    ONE,
    (ONE, [TWO]),
    {"a": ONE, "b": (TWO, 3)},
    Pair(ONE, None),
    Maps(ONE, [TWO]),
    {"x": Frozen(Maps(ONE))},
]


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_values_are_found_and_replaced_in_every_container(result):
    doubled = mapped(lambda value: value * 2 if isinstance(value, torch.Tensor) else value, result)
    assert type(doubled) is type(result)
    assert flattened(doubled)[1] == flattened(result)[1]
    for new, old in zip(tensors_of(doubled), tensors_of(result), strict=True):
        assert torch.equal(new, 2 * old)
    assert difference(doubled, result) == pytest.approx(1.0)
    assert agree(result, result)


def test_structures_differ_with_classes_and_fields():
    assert flattened(Maps(ONE))[1] != flattened(Frozen(Maps(ONE)))[1]
    assert difference(Maps(ONE, [TWO]), Maps(ONE)) == float("inf")
    assert difference(Maps(ONE, loss=1.0), Maps(ONE, loss=2.0)) == float("inf")
    assert difference(Maps(ONE), {"logits": ONE, "more": [], "loss": None}) == float("inf")
    assert flattened(Maps)[0] == [Maps]


def test_the_precision_of_a_dataclass_is_that_of_its_tensors():
    assert tolerance(Maps(ONE.double())) == tolerance(ONE.double())
