"""The nearest low-rank filters to given dense ones, as functions of tensors alone.

A separable pair of rank m is the matrix [c*k_w, d*k_h] of the dense weight cut to m singular values (Jaderberg et
al. 2014), the nearest of all pairs of that rank; for `2+1` it is [c*k_h*k_w, d*k_t]. A basis and its join are a
sum, over the groups, of matrices [d, taps*c] of rank m_i that live on the group's taps alone. Each group in turn
is fitted to the residual of the others, again by cutting singular values, which lowers the error at every step.
Taps that no group has (the corners, for a vertical and a horizontal group) are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lowrank_cnn.core.errors import require
from lowrank_cnn.kernels.reference import compose, interleaved
from lowrank_cnn.method.layers import centred
from lowrank_cnn.method.spec import Composite, FilterGroup


def separable_factors(
    weight: Tensor, m: int, *, axes: Sequence[int], groups: int = 1, covariance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The best pair whose first half has these axes: for (1,) it is [m, c, 1, k_w] and [d, m, k_h, 1].

    Singular values are shared evenly between the two. With channel groups, m is their total. With the
    `covariance` [groups, c x taps, c x taps] of the inputs of the first half, errors are weighed by their effect
    on the output.
    """
    moments = [None] * groups if covariance is None else list(covariance)
    pairs = zip(weight.chunk(groups), moments, strict=True)
    parts = [_separable(part, m // groups, axes, moment) for part, moment in pairs]
    return torch.cat([first for first, _ in parts]), torch.cat([second for _, second in parts])


def crossed_factors(weight: Tensor, basis: Composite, *, sweeps: int = 30) -> tuple[list[Tensor], Tensor]:
    """Basis filters [m_i, c, h_i, w_i] for each group, and the join [d, m, 1, 1], for a dense [d, c, k_h, k_w]."""
    kernel = tuple(map(max, zip(weight.shape[2:], basis.kernel, strict=True)))
    left, error = centred(weight, kernel), float("inf")
    number = len(basis.groups)
    filters, joins, products = [weight] * number, [weight] * number, [torch.zeros_like(left)] * number
    for _ in range(sweeps if number > 1 else 1):
        for index, group in enumerate(basis.groups):
            left = left + products[index]
            found = _nearest(centred(left, group.kernel), group.filters)
            filters[index], joins[index], products[index] = *found[:2], centred(found[2], kernel)
            left = left - products[index]
        before, error = error, float(left.square().sum())
        if error > before * (1 - 1e-4):
            break
    join = torch.cat(joins, dim=1)
    return filters, join.reshape(*join.shape, *[1] * len(kernel))


def kept_energy(weight: Tensor, fitted: Tensor) -> float:
    """The share of the squared weight that the fitted one keeps; both centred on the same tap."""
    kernel = tuple(map(max, zip(weight.shape[2:], fitted.shape[2:], strict=True)))
    target = centred(weight, kernel)
    missing = (target - centred(fitted, kernel)).square().sum() / target.square().sum().clamp_min(1e-30)
    return 1.0 - float(missing)


def _separable(weight: Tensor, m: int, axes: Sequence[int], moment: Tensor | None) -> tuple[Tensor, Tensor]:
    filters, channels, *kernel = weight.shape
    matrix = unfolded(weight, axes)
    if moment is None:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    else:
        # The square root of the moment and its inverse, with a small floor for directions without energy.
        sizes, vectors = torch.linalg.eigh(moment.to(matrix))
        sizes = sizes.clamp_min(1e-6 * float(sizes.max().clamp_min(1e-30))).sqrt()
        root, inverse = (vectors * sizes) @ vectors.T, (vectors / sizes) @ vectors.T
        left, values, right = torch.linalg.svd(root @ matrix, full_matrices=False)
        left = inverse @ left
    root, spare = values[:m].sqrt(), max(0, m - len(values))
    first = F.pad((left[:, :m] * root).T, (0, 0, 0, spare))
    second = F.pad(root[:, None] * right[:m], (0, 0, 0, spare)).reshape(m, filters, -1).transpose(0, 1)
    ours = [size if axis in axes else 1 for axis, size in enumerate(kernel)]
    rest = [1 if axis in axes else size for axis, size in enumerate(kernel)]
    return first.reshape(m, channels, *ours), second.reshape(filters, m, *rest)


def unfolded(weight: Tensor, axes: Sequence[int]) -> Tensor:
    """The weight as the matrix whose rank is that of the pair: [channels x these axes, filters x the others]."""
    rest = [axis for axis in range(weight.dim() - 2) if axis not in axes]
    turned = weight.permute(1, *(2 + axis for axis in axes), 0, *(2 + axis for axis in rest))
    return turned.flatten(1 + len(axes)).flatten(0, len(axes))


def _nearest(weight: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Filters [m, c, h, w] and their join [d, m] nearest to a weight, and their product; spare ones are zero."""
    matrix = weight.flatten(1)
    # Left singular vectors from the small Gram matrix: to project onto them, their precision is enough.
    values, vectors = torch.linalg.eigh(matrix @ matrix.T)
    used = min(m, len(values))
    join = vectors[:, -used:].flip(1)
    filters = join.T @ matrix
    product = (join @ filters).reshape(weight.shape)
    balance = filters.norm(dim=1).clamp_min(1e-30).sqrt()
    join, filters = join * balance, filters / balance[:, None]
    extra = m - used
    filters = F.pad(filters, (0, 0, 0, extra)).reshape(m, *weight.shape[1:])
    return filters, F.pad(join, (0, extra)), product


def grouped_factors(
    weight: Tensor, basis: Composite, groups: int, *, sweeps: int = 30
) -> tuple[list[Tensor], Tensor]:
    """A basis and its join for each channel group by itself, put together as the layers hold them."""
    own = Composite(tuple(FilterGroup(*g.kernel, g.filters // groups) for g in basis.groups))
    parts = [crossed_factors(part, own, sweeps=sweeps) for part in weight.chunk(groups)]
    together = [torch.cat(filters) for filters in zip(*(filters for filters, _ in parts), strict=True)]
    return together, torch.cat([join for _, join in parts])


def grouped_weight(basis: Sequence[Tensor], join: Tensor, groups: int) -> Tensor:
    """The dense weight that equals a basis and its join."""
    kernel = tuple(map(max, zip(*(filters.shape[2:] for filters in basis), strict=True)))
    return compose(interleaved([centred(filters, kernel) for filters in basis], groups, 0), join, groups=groups)


def spectrum_shares(matrices: Tensor) -> Tensor:
    """The share of the squares that 1, 2, ... components keep of matrices [groups, rows, columns] together.

    Of zeros it is no number.
    """
    together = torch.linalg.svdvals(matrices).square().sum(0)
    return together.cumsum(0) / together.sum()


def channel_factors(matrices: Tensor, m: int) -> tuple[Tensor, Tensor, float]:
    """[groups, m, columns] and [groups, rows, m], whose product is nearest, and the share of squares it keeps."""
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    rank = min(m, values.shape[1])
    root = values[:, :rank].sqrt()
    filters = matrices.new_zeros(len(matrices), m, matrices.shape[2])
    filters[:, :rank] = root[:, :, None] * right[:, :rank]
    mixing = matrices.new_zeros(len(matrices), matrices.shape[1], m)
    mixing[:, :, :rank] = left[:, :, :rank] * root[:, None]
    kept = values[:, :rank].square().sum() / values.square().sum().clamp_min(1e-30)
    return filters, mixing, float(kept)


# CP forms of trained filters: a 1x1, a vertical and a horizontal strip per channel, a 1x1 (Lebedev et al. 2015).
#
# tensorly fits a dense weight by a sum of m outer products. Where less than a third of the MACs are left, this
# fits trained filters better than a separable pair; above, worse. Its alternating least squares may fail.

_ITERATIONS, _TOLERANCE = 60, 1e-6


class CPFactors(NamedTuple):
    """The weights of the four layers of a CP form, and the share of the squared weight that they keep."""

    reduce: Tensor  # [m, c, 1, 1]
    upright: Tensor  # [m, 1, k_h, 1]
    lying: Tensor  # [m, 1, 1, k_w]
    join: Tensor  # [d, m, 1, 1]
    energy: float


@torch.no_grad()
def cp_factors(weight: Tensor, m: int) -> CPFactors | None:
    """The CP form of m components that alternating least squares finds; None if it finds none.

    The four layers share the size of each component evenly.
    """
    tensorly = require("tensorly", extra="cp", purpose="the scheme cp")
    parafac = require("tensorly.decomposition", extra="cp").parafac
    numbers = weight.detach().double().cpu().numpy()
    try:
        with tensorly.backend_context("numpy", local_threadsafe=True):
            found = parafac(numbers, m, init="random", random_state=0, n_iter_max=_ITERATIONS, tol=_TOLERANCE)
    except (ArithmeticError, ValueError):  # a singular system
        return None
    scale, parts = torch.from_numpy(found[0]), [torch.from_numpy(part) for part in found[1]]
    sizes = torch.stack([part.norm(dim=0) for part in parts]).clamp_min(1e-30)
    shared = (sizes.prod(0) * scale.abs()).pow(1 / 4)
    join, reduce, upright, lying = (part / size * shared for part, size in zip(parts, sizes, strict=True))
    join = (join * scale.sign()).to(weight.device)[:, :, None, None]
    reduce = reduce.T.to(weight.device)[:, :, None, None]
    upright, lying = upright.T.to(weight.device)[:, None, :, None], lying.T.to(weight.device)[:, None, None, :]
    dense = torch.einsum("dm,mchw->dchw", join[:, :, 0, 0], reduce * upright * lying)
    if not bool(dense.isfinite().all()):
        return None
    return CPFactors(reduce, upright, lying, join, kept_energy(weight.detach().double(), dense))
