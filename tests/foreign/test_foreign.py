"""A handful of other people's networks through every transform; `make foreign` runs all of them.

The packages that hold them are part of the `dev` extra, so a missing one fails here.
"""

import pytest

from benchmarks.foreign import STEPS, Outcome, examine
from benchmarks.foreign_networks import networks

NETWORKS = {network.name: network for network in networks()}
FAST = tuple(step for step in STEPS if step != "exported")
"""torch.export takes several times longer than all else: two networks are enough."""


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param("pytorchcv:resnet20_cifar10", FAST, marks=pytest.mark.nightly),
        ("transformers:ResNetForImageClassification", STEPS),
        pytest.param("transformers:Wav2Vec2ForSequenceClassification", FAST, marks=pytest.mark.nightly),
        pytest.param("diffusers:AutoencoderTiny", FAST, marks=pytest.mark.nightly),
        pytest.param("diffusers:UNet2DModel", FAST, marks=pytest.mark.nightly),
        pytest.param("monai:UNet 3-D", FAST, marks=pytest.mark.nightly),
    ],
)
def test_a_foreign_network_is_transformed_exactly_or_refused_in_a_sentence(name: str, steps: tuple[str, ...]):
    outcome = examine(NETWORKS[name], steps=steps)
    assert not outcome.faults, outcome.cells
    assert set(outcome.cells) == set(steps)
    assert outcome.cells["counted"] == "equal"


@pytest.mark.nightly
def test_norms_of_a_network_with_a_conv_class_of_its_own_are_folded():
    outcome = examine(NETWORKS["efficientnet_pytorch:b0"], steps=("merged",))
    assert "49 of 49 folded" in outcome.cells["merged"]


def test_the_long_form_has_at_least_63_networks_of_five_packages():
    assert len(NETWORKS) >= 63
    assert len({name.partition(":")[0] for name in NETWORKS}) == 5


@pytest.mark.parametrize("cell", ["WRONG by 0.3", "RAW ERROR TypeError: no", "not built: no such package"])
def test_everything_but_a_result_and_a_refusal_is_a_fault(cell: str):
    assert Outcome("net", {"merged": cell}).faults
    assert not Outcome("net", {"merged": "refused: it has no weights."}).faults
