"""What the library notes of a module stays apart from the user's own names; its reports print as tables."""

import copy
import io

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.core.notes import Notes, note, notes

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


def test_notes_are_kept_by_field_and_by_module():
    net = nn.Linear(2, 2)
    assert notes(net) == Notes()
    note(net, input_size=SIZE)
    note(net, begun_from="a run")
    twin = copy.copy(net)
    note(twin, input_size=(1, 2, 3))
    assert (notes(net).input_size, notes(net).begun_from) == (SIZE, "a run")
    known = lr.create_model("nin", image_size=28, in_channels=1)
    assert known.input_size == notes(known).input_size == (1, 28, 28)


def test_notes_survive_copies_and_files():
    net = lr.convert(nn.Sequential(nn.Conv2d(16, 32, 3)), "lr-join")
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), copy.copy(net), torch.load(file, weights_only=False)):
        assert notes(other) == notes(net)
    assert not any("lowrank" in name for name in net.state_dict())


@pytest.mark.parametrize(
    "value", [nn.Linear(3, 3), 7, "text", None, [1, 2], {"changed": 1}], ids=lambda v: type(v).__name__
)
def test_whatever_a_user_calls_so_is_theirs(value: object, tmp_path):
    net = Foreign(value).eval()
    x = torch.randn(1, *SIZE)
    assert lr.count(net, SIZE).macs == 4 * 32 * 9 * 144
    new = lr.decompose(net, "separable(m=8)")
    for made in (new, lr.convert(net, "lr")):
        assert [change.name for change in notes(made).conversion.changed] == ["conv"]
    for made in (lr.merge(new), lr.plan(new, x, cache=False, repeats=3)):
        torch.testing.assert_close(made(x), new(x), rtol=1e-4, atol=1e-4)
    assert notes(lr.optimize(net, x, compile=False, cache=False, repeats=3)).input_size == SIZE
    lr.export(new, tmp_path / "net.safetensors", input_size=SIZE)
    torch.testing.assert_close(lr.load(tmp_path / "net.safetensors", into=net)(x), new(x))
    assert {type(getattr(new, name)) for name in NAMES} == {type(value)}


def test_a_conversion_prints_as_a_table():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1))
    assert str(notes(lr.convert(net, "lr-join")).conversion).splitlines() == [
        "layer  filters  now                     weights  now",
        "0      3x3,8    3x1,4 + 1x3,4 -> 1x1,8      224  144",
        "",
        "left  layer   why",
        "1     Conv2d  its kernel is 1x1",
    ]
