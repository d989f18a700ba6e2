import json

import torch
from torch import nn
from torch.nn.utils import prune

from lowrank_cnn.core.notes import notes
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.models import create_model
from lowrank_cnn.models.build import rebuild


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 5, padding="same", bias=False),
    )


def test_a_shared_layer_stays_shared():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(4, 4, 3, padding=1)
            self.again = nn.ModuleList([self.first])
            self.order = [self.first]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.order[0](self.again[0](self.first(x)))

    new = convert(Twice(), "lr")
    assert isinstance(new.first, CompositeConv2d)
    assert new.first is new.again[0] is new.order[0]
    assert [row.name for row in notes(new).conversion.changed] == ["first"]
    assert new(torch.randn(1, 4, 6, 6)).shape == (1, 4, 6, 6)


def test_dtype_device_layout_and_mode_are_kept():
    net = small().to(torch.bfloat16).to(memory_format=torch.channels_last)
    net[0].eval()
    new = convert(net, "lr-join")
    assert isinstance(new[0], FactoredConv2d)
    assert not new[0].training
    assert not new[0].basis.training
    assert new[3].training
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
    assert new[0].basis.weights[0].is_contiguous(memory_format=torch.channels_last)
    with torch.device("meta"):
        assert all(p.is_meta for p in convert(small(), "separable").parameters())


def test_a_conversion_can_be_made_in_steps_and_repeated_from_json():
    net = create_model("nin", width=0.1)
    new = convert(convert(net, "lr", where="features.conv1_1"), "lr-join(m=7)", where="features.conv2_1")
    stored = json.loads(json.dumps(notes(new).conversion.to_dict()))
    again = rebuild({"conversion": stored}, into=create_model("nin", width=0.1))
    again.load_state_dict(new.state_dict())
    x = torch.randn(1, 3, 30, 30)
    torch.testing.assert_close(again.eval()(x), new.eval()(x))


def test_layers_around_convs_pass_through_untouched():
    net = nn.ModuleDict(
        {
            "conv": nn.Conv2d(4, 8, 3),
            "attention": nn.MultiheadAttention(8, 2),
            "up": nn.ConvTranspose2d(8, 4, 3),
            "line": nn.Conv1d(4, 4, 3),
            "volume": nn.Conv3d(4, 4, 3),
            "patches": nn.Conv2d(4, 8, 4, stride=4),
            "row": nn.Conv2d(4, 8, (1, 5)),
        }
    )
    new = convert(net, "lr")
    assert [row.name for row in notes(new).conversion.changed] == ["conv"]
    assert {row.name: row.reason for row in notes(new).conversion.kept} == {
        "up": "it is transposed: the scheme channel takes it",
        "line": "it is not two-dimensional: the scheme channel takes it",
        "volume": "it is not two-dimensional: the scheme channel takes it",
        "patches": "it projects patches: name it to convert it",
        "row": "its kernel is 1x5",
    }
    assert [row.name for row in notes(convert(net, "lr", where="patches")).conversion.changed] == ["patches"]


def test_a_weight_that_a_hook_computes_is_copied_and_computed_anew():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    prune.l1_unstructured(net[0], "weight", 0.5)  # leaves a weight with gradients, which torch does not copy
    new = copy_with(net)
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(new(x), net(x))
    assert new[0].weight_orig is not net[0].weight_orig
    new(x).sum().backward()
    assert new[0].weight_orig.grad is not None
    assert net[0].weight_orig.grad is None
