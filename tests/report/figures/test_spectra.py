import pytest
import torch

from lowrank_cnn.models import create_model
from lowrank_cnn.report.network_figures import dense_layers, singular_energy, spatial_energy


def test_trained_filters_are_of_lower_rank_than_random_ones():
    for weight in dense_layers(create_model("nin", pretrained="cifar10")).values():
        chance = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        assert spatial_energy(weight)[0] > spatial_energy(chance)[0] + 0.05


def test_spectra_know_a_rank_one_filter():
    rank_one = torch.einsum("dch,dcw->dchw", torch.randn(4, 3, 3), torch.randn(4, 3, 3))
    assert spatial_energy(rank_one)[0] == pytest.approx(1.0)
    assert singular_energy(rank_one[:1].expand(5, -1, -1, -1))[0] == pytest.approx(1.0)
