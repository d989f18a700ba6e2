"""The families of networks: what is listed, and what is built."""

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.models import nin
from lowrank_cnn.models.build import build_network, family_of, list_models


def test_every_network_of_the_paper_is_listed():
    assert list_models(paper=True) == [
        "vgg11", "vgg11-gmp", "vgg11-gmp-sf", "vgg11-gmp-lr", "vgg11-gmp-lr-2x", "vgg11-gmp-lr-join",
        "vgg11-gmp-lr-lde", "vgg11-gmp-lr-join-wfull", "googlenet", "googlenet-lr", "googlenet-lr-conv1",
        "nin", "nin-c3", "nin-c3-lr",
    ]  # fmt: skip
    assert list_models()[14:] == [
        "resnet18", "resnet18-lr", "resnet18-lr-late", "resnet18-small", "resnet18-small-lr",
        "resnet18-small-lr-late", "airbench", "airbench-lr",
    ]  # fmt: skip


def test_a_network_is_built_by_its_family():
    assert family_of("nin-c3-lr") is nin
    assert build_network("nin-c3-lr", width=0.1).config["name"] == "nin-c3-lr"
    for unknown in ("nin-c4", "hf-hub:user/name"):
        with pytest.raises(LowRankError, match="there is no network"):
            build_network(unknown)
