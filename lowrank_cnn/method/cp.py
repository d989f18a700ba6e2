"""CP forms of trained filters: a 1x1, an upright and a lying strip per channel, and a 1x1 (Lebedev et al. 2015).

A dense weight [d, c, k_h, k_w] is fitted by a sum of m outer products, by tensorly's alternating least squares. On
trained filters this fits better than a separable pair where less than a third of the MACs are left, and worse
above. Alternating least squares is not certain to find the optimum, and may fail.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowrank_cnn.method.factorize import kept_energy
from lowrank_cnn.system.errors import require

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
