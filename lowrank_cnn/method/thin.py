"""Make a dense network thinner: the rival that every low-rank network has to beat.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 10))
    >>> thin(net, width=0.5, input_size=(3, 8, 8))[0].out_channels
    32

Every layer keeps its kernel, stride and place and loses output channels; the layers that give the outputs of the
network keep theirs. How many channels a layer receives is not computed from a graph: the network runs once on the
meta device, and each layer is built for what arrives. So concatenations, residual sums and hand-written forwards
need no special rules.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lowrank_cnn.core.compare import mapped, tensors_of, unchanged
from lowrank_cnn.core.errors import LowRankError, LowRankWarning, check_number, explained, nearest
from lowrank_cnn.core.modules import InputSize, arguments, checked_size, computes_as, is_example
from lowrank_cnn.core.notes import AsDict, forget, note, notes
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.method.branches import BranchedConv2d
from lowrank_cnn.method.chains import FactoredConv2d, FactoredLayer, outputs_of
from lowrank_cnn.method.count import ShapesOnly, count
from lowrank_cnn.method.init import init_
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.rewrite import copy_with, failure, is_channels_last
from lowrank_cnn.method.select import check_rewritable

# Build a layer of the same kind for other numbers of channels.

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
LAYERS = (*CONVS, *NORMS, nn.Linear, nn.GroupNorm, nn.PReLU)
LOW_RANK = (CompositeConv2d, BranchedConv2d, FactoredConv2d, FactoredLayer)
_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name)


class PendingLayer(nn.Module):
    """Stands for a layer until the first input says how many channels arrive."""

    def __init__(self, layer: nn.Module, channels: Callable[[int], int]) -> None:
        super().__init__()
        self.layer, self.channels = layer, channels
        self.built: nn.Module | None = None

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        if self.built is None:
            x = inputs[0] if inputs else options["input"]
            with torch.device("meta"):
                self.built = resized(self.layer, x, self.channels).train(self.training)
            take_hooks(self.built, self.layer, {})
        return self.built(*inputs, **options)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the layer, such as its stride. Its weights have no shape before it runs."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or name in ("layer", "built"):
                raise
        value = getattr(self.built or self.layer, name)
        if self.built is None and isinstance(value, Tensor):
            raise AttributeError(f"it reads the {name} of a {type(self.layer).__name__} that has not run")
        return value


def resized(layer: nn.Module, x: Tensor, channels: Callable[[int], int]) -> nn.Module:
    """A layer of the same kind for the channels that arrive in `x`; `channels` gives those that leave.

    >>> resized(nn.Conv2d(3, 8, 5, groups=1), torch.empty(1, 6, 9, 9), lambda leaving: leaving // 2)
    Conv2d(6, 4, kernel_size=(5, 5), stride=(1, 1))
    """
    if isinstance(layer, nn.Linear):
        return nn.Linear(x.shape[-1], channels(layer.out_features), bias=layer.bias is not None)
    if isinstance(layer, nn.PReLU):
        return nn.PReLU(x.shape[1] if layer.num_parameters > 1 else 1, layer.init)
    arriving = x.shape[1]
    if isinstance(layer, nn.GroupNorm):
        return nn.GroupNorm(_groups(layer.num_groups, arriving), arriving, eps=layer.eps, affine=layer.affine)
    if isinstance(layer, NORMS):
        return _resized_norm(layer, arriving)
    assert isinstance(layer, CONVS)
    depthwise = layer.groups == layer.in_channels > 1
    leaving = arriving * layer.out_channels // layer.in_channels if depthwise else channels(layer.out_channels)
    groups = arriving if depthwise else _groups(layer.groups, arriving, leaving)
    names = ("stride", "padding", "dilation", "padding_mode")
    names += ("output_padding",) if isinstance(layer, TRANSPOSED) else ()
    options: dict[str, Any] = {name: getattr(layer, name) for name in names}
    options |= {"groups": groups, "bias": layer.bias is not None}
    kind: Any = next(kind for kind in CONVS if isinstance(layer, kind))
    return kind(arriving, leaving, layer.kernel_size, **options)


def _is_volume_conv(layer: nn.Module) -> bool:
    """Whether a layer is torch's 3-D conv by another name, as in torchvision's video networks."""
    return isinstance(layer, nn.Conv3d) and computes_as(layer, nn.Conv3d)


def take_hooks(new: nn.Module, old: nn.Module, copied: dict[int, Any]) -> None:
    """Give a layer the hooks of another; `copied` has the copies of what hooks may hold, by id, as in deepcopy."""
    for name in _HOOKS:
        setattr(new, name, copy.deepcopy(getattr(old, name), copied))


def _resized_norm(layer: nn.Module, channels: int) -> nn.Module:
    """A copy of a batch or instance norm, of whatever class, for other channels."""
    new = copy.deepcopy(layer)
    new.num_features = channels  # type: ignore[assignment]
    for name, parameter in new._parameters.items():
        if parameter is not None:
            new._parameters[name] = nn.Parameter(parameter.new_empty(channels))
    for name, buffer in new._buffers.items():
        if buffer is not None and buffer.dim():  # the number of batches has none
            new._buffers[name] = buffer.new_empty(channels)
    return new


def _groups(wanted: int, *channels: int) -> int:
    """The largest number of groups up to `wanted` that divides all of these channels."""
    return next(groups for groups in range(wanted, 0, -1) if all(n % groups == 0 for n in channels))


# Fit parameters that belong to no layer of a known kind, such as the scale of a residual branch.
#
# A forward of the user's own multiplies maps by them, or adds them. If the maps have other channels than the
# parameter, the parameter gets theirs. Layer norms are treated alike: their subclasses permute channels.

_POINTWISE = ("mul", "add", "sub", "div", "mul_", "add_", "sub_", "div_")
_VIEWS = ("reshape", "view", "unsqueeze", "__getitem__")


class FittedParameters(TorchFunctionMode):
    """While a network runs on the meta device, resizes its parameters to the maps that they meet.

    `layers` are left alone: they are built for what arrives.
    """

    def __init__(self, network: nn.Module, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        known = {id(p) for layer in layers for p in layer.parameters()}
        self.homes: dict[Tensor, tuple[nn.Module, str]] = {
            parameter: (module, name)
            for module in network.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in known
        }
        self.views: dict[Tensor, Tensor] = {}
        self.norms: dict[nn.Module, tuple[int]] = {}

    def __exit__(self, *error: Any) -> None:
        """Put the new parameters in their places: a trial run leaves none of what it changed."""
        super().__exit__(*error)
        for parameter, (module, name) in self.homes.items():
            module._parameters[name] = parameter  # type: ignore[assignment]
        for norm, shape in self.norms.items():
            norm.normalized_shape = shape  # type: ignore[assignment]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options, name = kwargs or {}, getattr(func, "__name__", "")
        if func is functional.layer_norm:
            return self._normed(*args, **options)
        if name in _POINTWISE and len(args) == 2:
            args = [self._fitted(args[0], args[1]), self._fitted(args[1], args[0])]
        result = func(*args, **options)
        if name in _VIEWS and args[0] in self.homes and result.numel() == args[0].numel():
            self.views[result] = args[0]
        return result

    def _fitted(self, value: Any, maps: Any) -> Any:
        """A parameter, or a view of one, with the channels of the maps; any other value as it is."""
        if not isinstance(value, Tensor) or not isinstance(maps, Tensor):
            return value
        parameter = self.views.get(value, value)
        if parameter not in self.homes or maps.dim() < value.dim():
            return value
        beside = maps.shape[maps.dim() - value.dim() :]
        differ = [
            axis for axis, (n, m) in enumerate(zip(value.shape, beside, strict=True)) if n != m and 1 not in (n, m)
        ]
        if len(differ) != 1:
            return value
        (axis,) = differ
        own = [place for place, n in enumerate(parameter.shape) if n == value.shape[axis]]
        resized = self._resized(parameter, own[0], beside[axis])
        shape = [*value.shape[:axis], beside[axis], *value.shape[axis + 1 :]]
        return resized.reshape(shape)

    def _normed(
        self,
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        channels = x.shape[-1]
        if (
            len(normalized_shape) == 1
            and normalized_shape[0] != channels
            and weight is not None
            and weight in self.homes
        ):
            module, _ = self.homes[weight]
            self.norms[module] = normalized_shape = (channels,)
            weight = self._resized(weight, 0, channels)
            bias = self._resized(bias, 0, channels) if bias is not None and bias in self.homes else bias
        return functional.layer_norm(x, normalized_shape, weight, bias, eps)  # type: ignore[arg-type]

    def _resized(self, parameter: Tensor, axis: int, channels: int) -> Tensor:
        """Put a parameter of the new shape in the place of the old one."""
        module, name = self.homes.pop(parameter)
        shape = [*parameter.shape[:axis], channels, *parameter.shape[axis + 1 :]]
        new = nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)
        module._parameters[name] = new  # for the rest of this run
        self.homes[new] = (module, name)
        return new


_STEPS = 14
_FAR = 0.2
"""Users are told where the MACs miss what they asked for by more than this share of it."""


@dataclass(frozen=True)
class Thinning(AsDict):
    """What `thin` did, to repeat it on the dense network, and that network's MACs and parameters.

    `channels` are the outputs of each layer that has other ones now. `input_size` is None if an example was given.
    """

    channels: Mapping[str, int]
    input_size: tuple[int, ...] | None
    macs_before: int
    params_before: int
    macs: int

    @property
    def share(self) -> float:
        """The share of the MACs that is left."""
        return self.macs / max(1, self.macs_before)


@progress("thin")
def thin(
    model: nn.Module,
    *,
    width: float | None = None,
    macs: float | None = None,
    input_size: InputSize,
    multiple: int = 16,
    layers: Mapping[str, float] | None = None,
) -> nn.Module:
    """A thinner copy of a dense network, freshly initialised, to be trained from scratch.

    Parameters and buffers that no `reset_parameters` sets, such as the scale of a module of your own, keep the
    values that they have in `model`. One that gets other channels must have one value for all of them. Layers that
    share a parameter go on sharing it, and all keep their hooks.

    - `width`: the share of its output channels that each layer keeps.
    - `macs`: the share of multiply-accumulates to keep instead; the nearest width is found by bisection.
    - `input_size`: channels, height and width of one image, or an example: a tensor, a tuple of all inputs, or a
      dictionary of them by keyword.
    - `multiple`: channels are rounded to multiples of this, which kernels of every engine run fast. A layer with
      fewer channels than this keeps them. With a large one, narrow layers stay as they are and wide ones have to
      pay for it by `macs`: a `width` divides better. A warning says where the MACs are far from `macs`.
    - `layers`: the widths of some layers, by name or by the name of a module around them, in place of `width`:
      {"head": 1.0} leaves a head as wide as it is.

    >>> import lowrank_cnn as lr
    >>> dense = lr.create_model("vgg11-gmp", width=0.5)
    >>> thin = lr.thin(dense, width=0.5, input_size=(3, 64, 64))
    >>> lr.count(thin, (3, 64, 64)).macs < lr.count(dense, (3, 64, 64)).macs
    True
    """
    blank = narrowed("thin", model, width, macs, input_size, multiple, layers or {}, most=4)
    return noted("thin", _fresh(blank, model), model, width, macs, input_size, multiple)


def narrowed(
    what: str,
    model: nn.Module,
    width: float | None,
    macs: float | None,
    input_size: InputSize,
    multiple: int,
    layers: Mapping[str, float],
    *,
    most: float,
) -> nn.Module:
    """The network that `thin` or `prune` is asked for, on the meta device: its shapes without its weights."""
    check_rewritable(model)
    if (width is None) == (macs is None):
        raise LowRankError(f"{what} takes either a width or a share of the multiply-accumulates (macs).")
    share = width if width is not None else macs
    check_number("macs" if width is None else "width", share, above=0, most=most)
    assert share is not None
    if found := [name for name, layer in model.named_modules() if isinstance(layer, LOW_RANK)]:
        raise LowRankError(f"{what} takes dense networks, and {found[0]} is low-rank: {what} first, then convert.")
    blank = copy_with(model).to("meta").float().eval()
    plan = _Thinning(blank, _in_single(input_size), multiple, _own_widths(blank, layers))
    return plan.at(share) if width is not None else plan.nearest(share * count(model, input_size).macs)


def noted(
    what: str,
    new: nn.Module,
    model: nn.Module,
    width: float | None,
    macs: float | None,
    input_size: InputSize,
    multiple: int,
) -> nn.Module:
    """Run a thinner network once, and note its channels, with which it is built again."""
    if reason := failure(new, input_size):  # the meta device does not check the shapes of every operation
        raise LowRankError(f"the network cannot be made thinner: {reason}")
    before, after, known = count(model, input_size), count(new, input_size).macs, notes(model).thinning
    _tell_if_far(what, after / before.macs, width, macs, multiple)
    told = (known.macs_before, known.params_before) if known else (before.macs, before.params)
    size = None if is_example(input_size) else checked_size(input_size)
    if channels := (known.channels if known else {}) | _other_outputs(model, new):
        note(new, thinning=Thinning(channels, size, *told, after))
    return new


def fresh(model: nn.Module) -> nn.Module:
    """A copy with fresh weights, by the same rules as those of a thinner one."""
    return _fresh(copy_with(model).to("meta"), model)


def thin_again(model: nn.Module, thinning: Thinning) -> nn.Module:
    """Make the dense network as thin as another copy of it was made, with fresh weights."""
    if thinning.input_size is None:
        raise LowRankError("this network was made thinner on an example input: pass the thinner network itself.")
    blank = copy_with(model).to("meta").float().eval()
    plan = _Thinning(blank, checked_size(thinning.input_size), 1, {})
    names = {layer: name for name, layer in blank.named_modules()}
    new = _fresh(plan.built(lambda layer: lambda n: thinning.channels.get(names[layer], n)), model)
    note(new, thinning=thinning)
    return new


def _other_outputs(model: nn.Module, new: nn.Module) -> dict[str, int]:
    """The outputs of each layer that has more or fewer than before."""
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, (*CONVS, nn.Linear)))
    both = ((name, outputs_of(layer), outputs_of(new.get_submodule(name))) for name, layer in layers)
    return {name: now for name, before, now in both if now != before}


def thin_like(dense: nn.Module, model: nn.Module, input_size: InputSize) -> nn.Module | None:
    """A dense network, thinned to within a fifth of the MACs of another one; None if it cannot be."""
    try:
        macs = count(model, input_size).macs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LowRankWarning)
            thinner = thin_near(dense.eval(), macs / count(dense, input_size).macs, input_size).eval()
        return thinner if abs(count(thinner, input_size).macs / macs - 1) < _FAR else None
    except LowRankError:  # it has layers that cannot be thinned, or counted
        return None


def thin_near(
    model: nn.Module, macs: float, input_size: InputSize, make: Callable[..., nn.Module] = thin
) -> nn.Module:
    """`thin` or `prune` in multiples of 16 channels, or of 8 or 4 if only these come near the MACs."""
    for multiple in (16, 8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LowRankWarning)
            new = make(model, macs=macs, input_size=input_size, multiple=multiple)
        if abs(count(new, input_size).macs / count(model, input_size).macs / macs - 1) < _FAR:
            return new
    return make(model, macs=macs, input_size=input_size, multiple=4)


def _tell_if_far(what: str, kept: float, width: float | None, macs: float | None, multiple: int) -> None:
    """Warn if the network misses the requested width or MACs: a rival that is not thin proves nothing."""
    small = "; a smaller multiple comes nearer" if multiple > 1 else ""
    if macs is not None and abs(kept / macs - 1) > _FAR:
        told = f"{what} was asked for {macs:.2f} of the MACs, and comes to {kept:.2f}"
    elif width is not None and width < 1 and kept == 1:
        told = f"{what} was asked for {width:.2f} of the channels, and makes no layer thinner"
    else:
        return
    warnings.warn(f"{told}, in multiples of {multiple} channels{small}.", LowRankWarning, stacklevel=5)


def _own_widths(model: nn.Module, layers: Mapping[str, float]) -> dict[nn.Module, float]:
    """The widths that layers were given by name, or by that of a module around them."""
    names = [name for name, _ in model.named_modules()]
    for name, share in layers.items():
        if name not in names:
            raise LowRankError(f"the network has no layer {name!r}; {nearest(name, names)}")
        check_number(f"the width of {name}", share, above=0, most=4)
    return {layer: share for name, share in layers.items() for layer in model.get_submodule(name).modules()}


class _Thinning:
    """Makes thinner copies of a network that lies on the meta device; some layers have `own` widths."""

    def __init__(self, blank: nn.Module, size: InputSize, multiple: int, own: Mapping[nn.Module, float]) -> None:
        self.blank, self.size, self.multiple, self.own = blank, size, multiple, own
        self.last, self.shapes = _output_layers(blank, size)

    def nearest(self, target: float) -> nn.Module:
        """Bisect the width. MACs are a staircase of it: build each step once, and remember the closest."""
        low, high = 0.0, 4.0
        built: dict[tuple[int, ...], tuple[float, nn.Module]] = {}
        for _ in range(_STEPS):
            middle = (low + high) / 2
            widths = self._widths(middle)
            if widths not in built:
                step(f"width {middle:.2f}")
                found = self.at(middle)
                built[widths] = (count(found, self.size).macs, found)
            low, high = (middle, high) if built[widths][0] < target else (low, middle)
            if self._widths(low) == self._widths(high):  # as all between them
                break
        return min(built.values(), key=lambda pair: abs(pair[0] - target))[1]

    def _widths(self, width: float) -> tuple[int, ...]:
        """The channels of every conv and linear layer at a width."""
        layers = [layer for layer in self.blank.modules() if isinstance(layer, (*CONVS, nn.Linear))]
        return tuple(self._channels(layer, width)(outputs_of(layer)) for layer in layers)

    def _channels(self, layer: nn.Module, width: float) -> Callable[[int], int]:
        share = self.own.get(layer, width)
        return (lambda n: n) if layer in self.last else (lambda n: _rounded(n, share, self.multiple))

    def at(self, width: float) -> nn.Module:
        """The network at a width."""
        return self.built(lambda layer: self._channels(layer, width))

    def built(self, channels: Callable[[nn.Module], Callable[[int], int]]) -> nn.Module:
        """The network with other channels: `channels` gives for each layer the function from old to new ones."""
        pending = {
            layer: PendingLayer(copy.deepcopy(layer), channels(layer))
            for layer in self.blank.modules()
            if ((type(layer) in LAYERS or _is_volume_conv(layer)) and not _computed(layer))
            or isinstance(layer, NORMS)
        }
        new = copy.deepcopy(self.blank, {id(old): stand_in for old, stand_in in pending.items()}).eval()
        fixed = "the network cannot be made thinner, its forward expects fixed widths"
        with explained(fixed), torch.no_grad(), FittedParameters(new, pending.values()), unchanged(new):
            shapes = _shapes(_on_meta(new, self.size))
        if shapes != self.shapes:
            raise LowRankError("the network cannot be made thinner: its outputs would have other shapes.")
        built = {id(stand_in): stand_in.built or stand_in.layer for stand_in in pending.values()}
        return copy.deepcopy(new, built)


def _computed(layer: nn.Module) -> bool:
    """Whether hooks compute the weight from others (the older weight norm): such a layer keeps its channels."""
    return hasattr(layer, "weight") and "weight" not in layer._parameters


@torch.no_grad()
def _fresh(new: nn.Module, model: nn.Module) -> nn.Module:
    """Real memory with fresh weights, on the device, in the dtypes, memory formats and modes of the model."""
    sources = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers()))
    new = new.to_empty(device=next(model.parameters()).device)
    share_parameters(new, model)
    for name, tensor in _tensors(new):  # NaN marks what no initialisation has set
        tensor.fill_(torch.nan) if tensor.is_floating_point() else _take(name, tensor, sources[name])
    for module in new.modules():
        names = (name for name in ("reset_parameters", "_reset_parameters") if hasattr(module, name))
        if callable(reset := getattr(module, next(names, ""), None)):
            reset()
    init_(new)
    for name, tensor in _tensors(new):
        layout = torch.channels_last if is_channels_last(sources[name]) else torch.preserve_format
        tensor.data = tensor.data.to(sources[name].dtype, memory_format=layout)
        if tensor.is_floating_point() and not tensor.is_meta and bool(tensor.isnan().any()):
            _take(name, tensor, sources[name])
    twins = {id(module): new.get_submodule(name) for name, module in model.named_modules()}
    for module in model.modules():
        twins[id(module)].training = module.training
        take_hooks(twins[id(module)], module, twins)
    forget(new, "begun_from", "training_card", "int8_ranges")  # its weights are fresh
    return new


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _take(name: str, tensor: Tensor, source: Tensor) -> None:
    """Copy the values of a tensor; into another shape only if they are all equal."""
    if tensor.shape == source.shape:
        tensor.copy_(source)
    elif source.numel() and bool((source == source.flatten()[0]).all()):
        tensor.fill_(source.flatten()[0])
    else:
        raise LowRankError(f"the network cannot be made thinner: nothing initialises {name} in its new shape.")


def share_parameters(new: nn.Module, model: nn.Module) -> None:
    """Share the parameters that layers of the model share."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared = new.get_parameter(first.setdefault(parameter, name))
        if new.get_parameter(name).shape != shared.shape:
            raise LowRankError(
                f"the network cannot be made thinner: {name} and {first[parameter]} are one parameter, "
                "and would have different shapes."
            )
        home, _, own = name.rpartition(".")
        setattr(new.get_submodule(home), own, shared)


def _on_meta(model: nn.Module, size: InputSize) -> Any:
    """Run a network on the meta device on an image of this size, or on an example."""
    args, kwargs = arguments(size, device="meta", dtype=None)
    with ShapesOnly():
        return model(*args, **kwargs)


def _in_single(size: InputSize) -> InputSize:
    """An example in float32, as the network on the meta device is; the size of an image stays."""

    def single(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    return mapped(single, size)


def _output_layers(blank: nn.Module, size: InputSize) -> tuple[set[nn.Module], list[torch.Size]]:
    """The conv and linear layers from which the outputs come without another between, and the outputs' shapes.

    Autograd's graph shows them. If it shows none (the forward gives class numbers, say), the layer that runs last
    counts as the output.
    """
    order: list[nn.Module] = []
    made_by: dict[Any, nn.Module] = {}
    twin = copy.deepcopy(blank)
    places = dict(zip(twin.modules(), blank.modules(), strict=True))

    def remember(module: nn.Module, _inputs: Any, output: Any) -> None:
        order.append(places[module])
        made_by[output.grad_fn] = places[module]

    for module in twin.modules():
        if type(module) in (*CONVS, nn.Linear):
            module.register_forward_hook(remember)
            module.requires_grad_(True)
    failed = f"the network does not take an image of {checked_size(size)}"
    with explained(failed), torch.enable_grad(), unchanged():
        output = _on_meta(twin, size)
    # Back through the graph that autograd records, up to the first layer on each path.
    found: set[nn.Module] = set()
    seen: set[Any] = {None}
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_of(output)]
    while nodes:
        if (node := nodes.pop()) in made_by:
            found.add(made_by[node])
        elif node not in seen:
            seen.add(node)
            nodes += [past for past, _ in node.next_functions]
    return found or set(order[-1:]), _shapes(output)


def _shapes(output: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_of(output)]


def _rounded(channels: int, width: float, multiple: int) -> int:
    """The channels at a width, in multiples: 28 of them in sixteens are not 32 where the layer gets thinner."""
    if channels < multiple or width == 1:
        return channels
    found = max(multiple, round(channels * width / multiple) * multiple)
    return min(channels, found) if width < 1 else found
