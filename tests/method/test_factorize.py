import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_cnn.kernels.reference import compose
from lowrank_cnn.method.factorize import (
    centred,
    crossed_factors,
    crossed_weight,
    kept_energy,
    separable_energy,
    separable_factors,
)
from lowrank_cnn.method.spec import Composite

CROSS = Composite.of([(3, 1, 40), (1, 3, 40)])


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def crossed(d: int, c: int) -> torch.Tensor:
    """A dense weight without corners."""
    mask = torch.tensor([[0.0, 1, 0], [1, 1, 1], [0, 1, 0]], dtype=torch.float64)
    return weight(d, c, 3, 3) * mask


@pytest.mark.parametrize("lying", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_pair_of_full_rank_is_the_dense_weight(lying: bool, groups: int):
    dense = weight(8, 3, 3, 5)
    pair = separable_factors(dense, 40 * groups, horizontal_first=lying, groups=groups)
    torch.testing.assert_close(compose(*pair, groups=groups), dense)


@settings(max_examples=30)
@given(st.integers(1, 12), st.booleans(), st.integers(0, 5))
def test_what_a_pair_keeps_is_what_the_singular_values_say(m: int, lying: bool, seed: int):
    dense = weight(6, 4, 3, 3, seed=seed)
    first, second = separable_factors(dense, m, horizontal_first=lying)
    assert first.shape[0] == second.shape[1] == m
    expected = separable_energy(dense, horizontal_first=lying)[m - 1]
    assert kept_energy(dense, compose(first, second)) == pytest.approx(float(expected), abs=1e-10)


def test_no_other_pair_of_the_same_rank_is_nearer():
    dense = weight(6, 4, 3, 3)
    best = separable_factors(dense, 3, horizontal_first=True)
    kept = kept_energy(dense, compose(*best))
    first, second = (factor.clone().requires_grad_() for factor in best)
    loss = (compose(first, second) - dense).square().sum()
    for gradient in torch.autograd.grad(loss, (first, second)):
        assert gradient.abs().max() < 1e-10
    shaken = [factor + 0.1 * torch.randn_like(factor) for factor in best]
    assert kept_energy(dense, compose(*shaken)) < kept


def test_enough_basis_filters_fit_any_cross_exactly_and_lose_the_corners_of_others():
    cross = crossed(10, 5)
    assert kept_energy(cross, crossed_weight(*crossed_factors(cross, CROSS))) == pytest.approx(1, abs=1e-12)
    full = weight(10, 5, 3, 3)
    corners = full[:, :, ::2, ::2].square().sum() / full.square().sum()
    assert kept_energy(full, crossed_weight(*crossed_factors(full, CROSS))) == pytest.approx(1 - float(corners))


def test_every_sweep_lowers_the_error():
    dense, basis = weight(12, 6, 3, 3), Composite.of([(3, 1, 4), (1, 3, 3), (3, 3, 2)])
    kept = [kept_energy(dense, crossed_weight(*crossed_factors(dense, basis, sweeps=n))) for n in (1, 2, 4, 8, 16)]
    assert kept == sorted(kept)
    assert kept[-1] > kept[0]


def test_the_fit_is_stationary():
    dense, basis = weight(12, 6, 3, 3), Composite.of([(3, 1, 4), (1, 3, 3)])
    filters, join = crossed_factors(dense, basis, sweeps=200)
    parts = [part.requires_grad_() for part in (*filters, join)]
    loss = (crossed_weight(parts[:-1], parts[-1]) - dense).square().sum()
    for gradient in torch.autograd.grad(loss, parts):
        assert gradient.abs().max() < 0.05 * loss.item() ** 0.5


def test_filters_and_join_are_of_like_size():
    filters, join = crossed_factors(weight(8, 6, 3, 3), Composite.of([(3, 1, 4), (1, 3, 4)]))
    columns = join[:, :, 0, 0].norm(dim=0)
    rows = torch.cat([part.flatten(1) for part in (filters[0], filters[1])]).norm(dim=1)
    torch.testing.assert_close(columns, rows)


@pytest.mark.parametrize("kernel", [(5, 5), (3, 1), (1, 1), (2, 4), (3, 3)])
def test_centring_keeps_the_centre_tap(kernel: tuple[int, int]):
    dense = weight(2, 2, 3, 3)
    moved = centred(dense, kernel)
    assert moved.shape[2:] == kernel
    centre = [(size - 1) // 2 for size in kernel]
    assert torch.equal(moved[:, :, centre[0], centre[1]], dense[:, :, 1, 1])
