import pytest
import torch

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.models import create_model

SMALL = {"width": 0.0625}


@pytest.mark.parametrize(("size", "stride", "side"), [(224, 1, 7), (64, 1, 2), (56, 1, 2), (224, 2, 4)])
def test_vgg11_is_made_to_fit_an_image_size(size: int, stride: int, side: int):
    net = create_model("vgg11", num_classes=5, image_size=size, stride=stride, **SMALL).eval()
    assert net.input_size == (3, size, size)
    assert net.head.fc6.in_features == 32 * side**2
    assert net(torch.randn(1, 3, size, size)).shape == (1, 5)
    with pytest.raises(LowRankError, match=f"takes {size}x{size} images"):
        net(torch.randn(1, 3, 4 * size, 4 * size))
