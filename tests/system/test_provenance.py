"""What the library notes of a module stays apart from whatever the user calls their own."""

import copy
import io

import pytest
import torch
from torch import nn

from lowrank_cnn.core.notes import Notes, note, notes
from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.deploy.optimize import optimize
from lowrank_cnn.deploy.plan import plan
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.models import create_model

NAMES = [
    "conversion", "plan", "merging", "input_size", "auxiliary", "decomposition", "begun_from", "unpublished",
    "optimized", "config", "entries",
]  # fmt: skip
SIZE = (4, 12, 12)


class Foreign(nn.Module):
    """A network whose parts happen to have names that the library uses too."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 32, 3, padding=1)
        for name in NAMES:
            setattr(self, name, copy.deepcopy(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def test_a_module_that_nobody_worked_on_has_empty_notes():
    assert notes(nn.Linear(2, 2)) == Notes()


def test_what_is_not_given_keeps_its_value():
    net = nn.Linear(2, 2)
    note(net, input_size=SIZE)
    note(net, begun_from="a run")
    assert (notes(net).input_size, notes(net).begun_from) == (SIZE, "a run")


def test_notes_survive_copies_and_files():
    net = convert(nn.Sequential(nn.Conv2d(16, 32, 3)), "lr-join")
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), copy.copy(net), torch.load(file, weights_only=False)):
        assert notes(other) == notes(net)
    assert not any("lowrank" in name for name in net.state_dict())


def test_notes_of_a_copy_are_its_own():
    net = nn.Linear(2, 2)
    twin = copy.copy(net)
    note(twin, input_size=SIZE)
    assert notes(net).input_size is None


def test_a_network_knows_its_images():
    net = create_model("nin", image_size=28, in_channels=1)
    assert net.input_size == notes(net).input_size == (1, 28, 28)


@pytest.mark.parametrize(
    "value", [nn.Linear(3, 3), 7, "text", None, [1, 2], {"changed": 1}], ids=lambda v: type(v).__name__
)
def test_whatever_a_user_calls_so_is_theirs(value: object, tmp_path):
    net = Foreign(value).eval()
    x = torch.randn(1, *SIZE)
    assert count(net, SIZE).macs == 4 * 32 * 9 * 144
    new = decompose(net, "separable(m=8)")
    assert [change.name for change in notes(new).conversion.changed] == ["conv"]
    assert [change.name for change in notes(convert(net, "lr")).conversion.changed] == ["conv"]
    for made in (merge(new), plan(new, x, cache=False, repeats=3)):
        torch.testing.assert_close(made(x), new(x), rtol=1e-4, atol=1e-4)
    assert notes(optimize(net, x, compile=False, cache=False, repeats=3)).input_size == SIZE
    export(new, tmp_path / "net.safetensors", input_size=SIZE)
    again = load(tmp_path / "net.safetensors", into=net)
    torch.testing.assert_close(again(x), new(x))
    for name in NAMES:
        assert type(getattr(new, name)) is type(value)
