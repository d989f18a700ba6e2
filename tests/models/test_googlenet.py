import pytest
import torch

from lowrank_cnn.models import create_model
from lowrank_cnn.models.googlenet import AuxiliaryPool

SMALL = {"width": 0.0625}


def test_googlenets_auxiliary_heads_run_in_training_alone():
    net = create_model("googlenet-lr", num_classes=3, **SMALL)
    x = torch.randn(1, 3, 64, 64)
    assert isinstance(net.train()(x), tuple)
    assert len(net(x)) == 3
    assert isinstance(net.eval()(x), torch.Tensor)


@pytest.mark.parametrize(("maps", "means"), [(14, 5), (12, 5), (8, 2), (7, None), (4, 1), (2, None)])
def test_auxiliary_heads_see_sixteen_places_of_maps_of_any_size(maps: int, means: int | None):
    x = torch.arange(maps * maps, dtype=torch.float32).view(1, 1, maps, maps)
    pooled = AuxiliaryPool()(x)
    assert pooled.shape == (1, 1, 4, 4)
    assert len(pooled.unique()) == 16 or maps == 2
    if means is not None:
        assert pooled[0, 0, 0, 0] == x[0, 0, :means, :means].mean()
