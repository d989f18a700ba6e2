"""The families of networks, and building a network of one of them with fresh weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from lowrank_cnn.method.init import INITIALISATIONS
from lowrank_cnn.method.scheme import Scheme, parse_scheme
from lowrank_cnn.models import airbench, googlenet, nin, resnet, vgg
from lowrank_cnn.models.network import Network, Options
from lowrank_cnn.system.errors import LowRankError, nearest

PAPER_FAMILIES: tuple[ModuleType, ...] = (vgg, googlenet, nin)
FAMILIES = (*PAPER_FAMILIES, resnet, airbench)


def list_models(*, paper: bool = False) -> list[str]:
    """The names that `create_model` takes, the paper's networks first; with `paper`, those alone.

    >>> list_models(paper=True)[-1]
    'nin-c3-lr'
    """
    families = PAPER_FAMILIES if paper else FAMILIES
    return [name for family in families for name in family.VARIANTS]


def family_of(name: str) -> ModuleType:
    """The module that builds a network."""
    for family in FAMILIES:
        if name in family.VARIANTS:
            return family
    raise LowRankError(f"there is no network {name!r}; {nearest(name, list_models())}")


def build_network(
    name: str,
    *,
    num_classes: int | None = None,
    in_channels: int = 3,
    width: float = 1.0,
    norm: str | None = None,
    stride: int | None = None,
    scheme: str | Scheme | Mapping[str, object] | None = None,
    dropout: float | None = None,
    image_size: int | None = None,
    pool: str | None = None,
    init: str = "composite",
) -> Network:
    """A network with fresh weights; the options are those of `create_model`.

    >>> build_network("nin", width=0.1, num_classes=10).config["name"]
    'nin'
    """
    if init not in INITIALISATIONS:
        raise LowRankError(f"there is no initialisation {init!r}; {nearest(init, INITIALISATIONS)}")
    family = family_of(name)
    if pool is not None and family is not nin:
        raise LowRankError(f"pool is a choice of the nin networks; {name} has none: leave it out (pool=none).")
    variant, norm = family.VARIANTS[name], norm or getattr(family, "NORM", None)
    classes = family.CLASSES if num_classes is None else num_classes
    first = variant.stride if stride is None else stride
    text = None if scheme is None else str(parse_scheme(scheme))
    options = Options(classes, in_channels, width, norm, first, text, dropout, image_size, pool)
    model: Network = INITIALISATIONS[init](family.build(variant, options))  # type: ignore[assignment]
    model.settle()
    model.config = {"name": name, **vars(options), "init": init}
    return model
