import pytest
import torch

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.models import create_model

SMALL = {"width": 0.0625}


def test_stride_is_the_first_convs():
    with torch.device("meta"):
        net = create_model("vgg11-gmp-lr", stride=2)
        shape = net.features.conv1_1(torch.empty(1, 3, 224, 224)).shape
    assert shape == (1, 64, 112, 112)
    assert net.features.conv2_1.stride == (1, 1)


@pytest.mark.parametrize(("name", "least"), [("googlenet", 32), ("nin", 4), ("vgg11-gmp-lr", 1)])
def test_the_smallest_image_runs_and_a_smaller_one_is_refused(name: str, least: int):
    net = create_model(name, num_classes=3, **SMALL).train()
    net(torch.randn(2, 3, least, least))
    if least > 1:
        with pytest.raises(LowRankError, match=f"takes images of {least}x{least} at least"):
            net(torch.randn(2, 3, least - 1, least - 1))


def test_a_wrong_input_is_refused_in_a_sentence():
    with pytest.raises(LowRankError, match="takes images as"):
        create_model("nin", **SMALL)(torch.randn(1, 1, 30, 30))
