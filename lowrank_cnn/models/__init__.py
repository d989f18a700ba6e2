"""Networks by name: the paper's, ResNet-18, airbench. A family is a file: a table of variants and one builder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowrank_cnn.core.errors import LowRankError, check_type
from lowrank_cnn.core.notes import TrainingCard, note
from lowrank_cnn.method.schemes import Scheme
from lowrank_cnn.models.build import build_network, family_of, list_models
from lowrank_cnn.models.hub import push_to_hub, save_pretrained
from lowrank_cnn.models.network import Network
from lowrank_cnn.models.network_file import list_pretrained, read_pretrained

# Methods of networks, set here because `hub` builds networks itself.
Network.save_pretrained, Network.push_to_hub = save_pretrained, push_to_hub


def create_model(
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
    pretrained: str | None = None,
) -> Network:
    """Build a network by name, initialised as the paper does.

    - `width` scales every number of filters, for small machines.
    - `norm="batch"` puts batch norm before each ReLU; resnet and airbench networks always have it.
    - `stride` is that of the first conv (2 for the Places networks).
    - `scheme` replaces the variant's own, so that any family takes schemes the paper never tried.
    - `dropout` replaces every dropout rate. The default is the paper's, and 0 where a batch norm follows.
    - `image_size` is the side of the images that the network is for, where it is not the paper's: vgg11's first
      fully connected layer is made to fit it, the other networks take any.
    - `pool="average"` averages in the second pool of the nin networks, as the network that the paper starts from
      does; the paper's take the maximum.
    - `init` is one of `INITIALISATIONS`, to compare with.
    - `pretrained` names a data set, as in `pretrained="cifar10"`: the network comes with weights trained on it,
      and with the options that they were trained with; for another `num_classes`, its last layer begins anew.
      `list_pretrained` lists them.

    >>> import torch
    >>> import lowrank_cnn as lr
    >>> net = lr.create_model("vgg11-gmp", scheme="lr-join", width=0.25, num_classes=10)
    >>> net(torch.zeros(1, 3, 64, 64)).shape
    torch.Size([1, 10])
    """
    options = {key: value for key, value in locals().items() if key not in ("name", "pretrained")}
    check_type("pretrained", pretrained, str, type(None))
    return build_network(name, **options) if pretrained is None else _with_weights(name, pretrained, options)


_DEFAULTS: dict[str, Any] = create_model.__kwdefaults__ or {}
_FREE = ("dropout", "num_classes")
"""Options that may differ from the trained network's: they change at most the weights of the last layer."""


def _with_weights(name: str, data: str, options: Mapping[str, object]) -> Network:
    """Build a network with the options that its weights were trained with; a layer for other classes is new."""
    family_of(name)
    file = read_pretrained(name, data)
    config = file.description["model"]
    asked = {key: value for key, value in options.items() if value != _DEFAULTS[key]}
    for key, value in asked.items():
        if key not in _FREE and value != (known := config.get(key)):
            raise LowRankError(f"the weights of {name} on {data} are for {key}={known!r}, not {value!r}.")
    model = build_network(**config | {key: asked[key] for key in _FREE if key in asked})
    weights = file.weights()
    fresh = {name: own for name, own in model.state_dict().items() if own.shape != weights[name].shape}
    model.load_state_dict(weights | fresh)
    note(model, begun_from=f"{name} on {file.path.stem.rpartition('.')[2]}")
    if not fresh:
        note(model, training_card=TrainingCard({"model": config, **(file.card or {})}, file.preprocess()))
    return model.eval()


__all__ = ["Network", "create_model", "family_of", "list_models", "list_pretrained"]
