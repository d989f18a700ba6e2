"""Schemes: how a dense convolution is replaced by composites.

A *scheme* replaces a dense k_h x k_w convolution with d filters by one composite, or by a chain of them with no
activation between.

Each *kind* of scheme is a class with all that is particular to it. Named schemes are rows of `SCHEMES`; a program
adds its own by `register_scheme`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lowrank_cnn.core.errors import LowRankError, check_choice, check_number, nearest, to_caller
from lowrank_cnn.core.notes import AsDict
from lowrank_cnn.core.text import counted
from lowrank_cnn.kernels.reference import compose
from lowrank_cnn.method.branches import branched_conv
from lowrank_cnn.method.chains import (
    FactoredConv2d,
    FactoredConv3d,
    FactoredLayer,
    factored_layer,
    groups_of,
    outputs_of,
)
from lowrank_cnn.method.factorize import (
    CPFactors,
    centred,
    channel_factors,
    cp_factors,
    grouped_factors,
    grouped_weight,
    kept_energy,
    separable_factors,
    spectrum_shares,
    unfolded,
)
from lowrank_cnn.method.layers import (
    CompositeConv2d,
    ConvForm,
    Padding,
    conv_of,
    enclosing_padding,
    form_of,
    is_torch_layer,
    per_axis,
    recentred,
    set_weights,
)
from lowrank_cnn.method.shaped_layers import ShapedConv2d
from lowrank_cnn.method.spec import Composite, FilterGroup, Kernel, resolve_shape

IDENTITY = "identity"
"""The shape of channels that `bands` passes on as they are."""
SHAPE = re.compile(r"(k|[1-9]\d{0,4})(x(k|[1-9]\d{0,4})){1,2}")
LARGEST = 10**9
EVERY = (0, 1, 2)
"""The axes of a stage that takes the stride, dilation and padding of the conv along all of them."""
SCHEMES: dict[str, Scheme] = {}
"""Every scheme by name, with its defaults."""
_OPTIONS: dict[str, frozenset[str]] = {}
"""What a scheme takes in brackets besides shapes, by name."""
_FIELDS = ("m", "to", "multiple", "channel_groups", "branches")
"""The options in a scheme's text, in its order, which are fields; `join` sets `to`."""


@dataclass(frozen=True)
class Scheme:
    """How a dense convolution is replaced. Build one with `parse_scheme`.

    - `shapes`: the basis filters' shapes, in terms of the dense k_h x k_w ("kx1", "1xk", "kxk", "5x1"), each with
      its proportion. For `separable` and `2+1` they are the two halves, in order. Shapes for volumes have three
      sides, time first ("kx1x1"); over volumes the shapes kx1 and 1xk of `lr` become a strip along each axis.
    - `m`: the number of basis filters, where something follows them: an integer, a share of d, or None for d.
    - `to`: the filters of the closing 1x1 join as a share of d; None where there is no join.
    - `multiple`: for `learned`, the number of filters of each shape is a multiple of this.
    - `channel_groups`: each basis filter sees one of this many parts of the input channels. A join then mixes the
      parts; without one, the outputs of the parts are shuffled, so that the next layer mixes them.
    - `branches`: training adds a 1x1 conv and the identity, folded into the basis filters afterwards.

    >>> import lowrank_cnn as lr
    >>> scheme = lr.parse_scheme("mixture(kx1=3, 1xk=3, kxk=2, join)")
    >>> print(*scheme.stages((3, 3), 64), sep=" -> ")
    3x1,24 + 1x3,24 + 3x3,16 -> 1x1,64
    """

    name: str
    shapes: tuple[tuple[str, Fraction], ...] = ()
    m: int | float | None = None
    to: float | None = None
    multiple: int | None = None
    channel_groups: int = 1
    branches: bool = False

    parts: ClassVar[tuple[str, ...]] = ("basis", "join")  # the names of a chain's layers
    layers: ClassVar[tuple[type[nn.Module], ...]] = (_ConvNd,)  # those that it may take
    inner_biases: ClassVar[bool] = True  # layers before the last may have biases
    saves: ClassVar[bool] = True  # it is there to make layers cheaper
    weighs_inputs: ClassVar[bool] = False  # its fit can weigh errors by the covariance of the layer's inputs
    rival: ClassVar[str | None] = None  # under a budget, layers take this scheme unless the own one fits better
    # Without annotations, because some kinds compute these by a property:
    mixes = False  # a layer after the basis filters mixes them: m can be chosen, and trained filters be fitted
    takes_depthwise = False  # it takes convs that filter each channel by itself
    axes = (EVERY, ())  # those that each stage runs along, where it has the conv's stride; 0 is the first side
    shares = (Fraction(1),)  # the proportions in which m basis filters are shared out among shapes

    # `Scheme("lr", ...)` is of the kind that has this name. Named parameters: help() shows those of `__new__`.
    def __new__(cls, name="", shapes=(), m=None, to=None, multiple=None, channel_groups=1, branches=False):
        return object.__new__(type(SCHEMES[name]) if cls is Scheme and name in SCHEMES else cls)

    def __post_init__(self) -> None:
        if type(self) is Scheme:
            raise LowRankError(f"there is no scheme {self.name!r}; {nearest(str(self.name), SCHEMES)}")
        # A float such as 0.1 becomes 1/10, and every share has a text that can be read again.
        shares = tuple((shape, Fraction(share).limit_denominator(LARGEST)) for shape, share in self.shapes)
        object.__setattr__(self, "shapes", shares)
        self.check()
        if isinstance(self.m, float) and self.m == 1:  # one spelling of d, so that equal schemes compare equal
            object.__setattr__(self, "m", None)

    def check(self) -> None:
        """Raise `LowRankError` if no layer can be built from it."""
        for shape, proportion in self.shapes:
            if not self.takes_shape(shape):
                raise LowRankError(f"a filter shape is written like kx1, 1xk, kxk or 5x1, not {shape!r}.")
            if len({text.count("x") for text, _ in self.shapes if SHAPE.fullmatch(text)}) > 1:
                listed = " and ".join(text for text, _ in self.shapes)
                raise LowRankError(f"the shapes of a scheme have as many sides each, unlike {listed}.")
            if not 0 < proportion <= LARGEST:
                raise LowRankError(f"the proportion of {shape} filters must be positive, not {proportion}.")
        for field in _FIELDS:
            if field != "branches" and (value := getattr(self, field)) is not None:
                check_number(f"{field} in the scheme {self.name}", value, above=0, most=LARGEST)
        options = _OPTIONS.get(self.name, frozenset({"to", "branches"}))
        if self.branches and "branches" not in options:
            able = [name for name, taken in _OPTIONS.items() if "branches" in taken]
            raise LowRankError(f"branches are for {', '.join(able)}, not for {self.name}.")
        if self.branches and self.channel_groups > 1:
            raise LowRankError("branches see all channels: a scheme has either branches or channel_groups.")
        default = SCHEMES.get(self.name)
        joins = (default.to, 1.0) if default and "join" in options else (default and default.to,)
        if default and "to" not in options and self.to not in joins:
            raise LowRankError(f"the scheme {self.name} cannot join to {self.to}; embed(to={self.to}) can.")

    def takes_shape(self, shape: str) -> bool:
        return bool(SHAPE.fullmatch(shape))

    def __str__(self) -> str:
        default = SCHEMES.get(self.name, type(self))
        shapes = () if self.shapes == default.shapes else self.shapes
        items = [shape if share == 1 else f"{shape}={share}" for shape, share in shapes]
        for field in _FIELDS:
            if (value := getattr(self, field)) != getattr(default, field):
                joins = field == "to" and "join" in _OPTIONS.get(self.name, ())
                items.append("join" if joins else field if value is True else f"{field}={value}")
        return self.name + (f"({', '.join(items)})" if items else "")

    # What it builds.

    @property
    def refusal(self) -> str:
        """The reason why it cannot rewrite the layers of a network; empty if it can."""
        if self.to in (None, 1.0):
            return ""
        return f"{self.name} changes the number of channels that the next layer expects: use lr-join."

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The axes of the convs that it takes: 2 for images, 3 for volumes."""
        return (3,) if any(shape.count("x") == 2 for shape, _ in self.shapes) else (2,)

    def out_filters(self, filters: int) -> int:
        """The output channels of the replacement of a conv with `filters` filters."""
        return filters if self.to is None else _scaled(self.to, filters)

    def for_layer(self, in_channels: int, filters: int, channel_groups: int = 1) -> Scheme:
        """The scheme without its channel groups if a layer's channels (three, say) do not divide into them."""
        parts = self.channel_groups
        whole = channel_groups > 1 or in_channels % parts or filters % parts or filters // parts < len(self.shapes)
        return replace(self, channel_groups=1) if parts > 1 and whole else self

    def stages(self, kernel: Kernel, filters: int, *, channel_groups: int = 1) -> tuple[Composite, ...]:
        """The composites that replace a dense conv, in order, with nothing between them."""
        if len(kernel) not in self.dimensions:
            raise LowRankError(f"the scheme {self} is not for kernels of {len(kernel)} sides.")
        check_number("the number of filters", filters, least=1, whole=True)
        check_number("channel_groups", channel_groups, least=1, whole=True)
        return self.chain(kernel, filters, channel_groups)

    def chain(self, kernel: Kernel, filters: int, channel_groups: int) -> tuple[Composite, ...]:
        """The composites of this kind of scheme."""
        raise NotImplementedError

    def obstacle(self, layer: nn.Module) -> str:
        """The reason why it cannot replace a layer of torch; empty if it can."""
        if isinstance(layer, _ConvTransposeNd):
            return "it is transposed: the scheme channel takes it"
        if not isinstance(layer, nn.Conv2d | nn.Conv3d) or len(layer.kernel_size) not in self.dimensions:
            axes = "two" if 2 in self.dimensions else "three"
            others = "lr, 2+1 and channel take" if isinstance(layer, nn.Conv3d) else "channel takes"
            return f"it is not {axes}-dimensional: the scheme{'s' * (others[0] == 'l')} {others} it"
        if min(layer.kernel_size) == 1:
            return f"its kernel is {'x'.join(map(str, layer.kernel_size))}"
        takes = self.takes_depthwise and isinstance(layer, nn.Conv2d)
        return "it is depthwise" if is_depthwise(layer) and not takes else ""

    def build(self, layer: nn.Module) -> nn.Module:
        """Build the replacement of a layer; its weights are set later."""
        return self.build_form(form_of(layer))

    def build_form(self, form: ConvForm) -> nn.Module:
        """Build the replacement of a conv of this form."""
        return build_conv(scheme=self, **vars(form))

    # What it costs.

    def stage_weights(self, layer: nn.Module) -> list[int]:
        """The number of weights of each layer that replaces a layer."""
        assert isinstance(layer, nn.Conv2d | nn.Conv3d)
        scheme = self.for_layer(layer.in_channels, layer.out_channels, layer.groups)
        stages = scheme.stages(layer.kernel_size, layer.out_channels, channel_groups=layer.groups)
        depths = [layer.in_channels // scheme.channel_groups, *(stage.filters for stage in stages)]
        return [stage.weights(depth // layer.groups) for stage, depth in zip(stages, depths, strict=False)]

    def params(self, layer: nn.Module) -> int:
        """Parameters of what replaces a layer, with the bias."""
        return sum(self.stage_weights(layer)) + (0 if layer.bias is None else outputs_of(layer))

    def macs(self, layer: nn.Module) -> int:
        """MACs per output pixel of what replaces a layer; for a dense conv this is its number of weights."""
        assert isinstance(layer, nn.Conv2d | nn.Conv3d)
        total, pixels = 0, 1
        for weights, axes in reversed(list(zip(self.stage_weights(layer), self.axes, strict=False))):
            total += weights * pixels
            # Earlier stages compute this many for each.
            pixels *= prod(step for axis, step in enumerate(layer.stride) if axis in axes)
        return total

    def relative_cost(self, layer: nn.Module) -> float:
        """The MACs of what replaces a layer, as a share of its own."""
        return self.macs(layer) / layer.weight.numel()  # type: ignore[operator, union-attr]

    # How it fits trained filters.

    def useful_rank(self, layer: nn.Module) -> int:
        """The number of basis filters per channel group beyond which a fit does not improve."""
        raise NotImplementedError

    def spectrum(self, layer: nn.Module) -> Tensor | None:
        """The share of the squared weight that 1, 2, ... filters per group keep; None if each needs a fit."""
        return None

    def energy(self, layer: nn.Module) -> float:
        """The share of the squared weight that m filters keep, by a quick fit."""
        raise NotImplementedError

    def fit(self, name: str, conv: nn.Module, layer: nn.Module, known: Any = None) -> float:
        """Give a chain the filters nearest to those of a conv, and return the share of its energy that they keep.

        `known` was found before: the covariance of the inputs, or the factors.
        """
        raise NotImplementedError


class Basis(Scheme):
    """Filters of several shapes side by side, optionally mixed by a 1x1 join.

    A class of one's own overrides `sides`, and `register_scheme` makes it known:

    >>> import lowrank_cnn as lr
    >>> class Longer(lr.Basis):
    ...     def sides(self, kernel):
    ...         return [((kernel[0] + 2, 1), 1), ((1, kernel[1] + 2), 1)]
    >>> print(*Longer("longer", to=1.0).stages((3, 3), 64), sep=" -> ")
    5x1,32 + 1x5,32 -> 1x1,64
    """

    def check(self) -> None:
        super().check()
        if self.to is None and self.m is not None:
            raise LowRankError("m basis filters need a join after them: write mixture(..., m=..., join).")
        if type(self).sides is Basis.sides and not self.shapes:
            raise LowRankError(f"the scheme {self.name} needs shapes, such as {self.name}(kx1, 1xk, kxk).")

    @property
    def mixes(self) -> bool:
        return self.to is not None

    @property
    def shares(self) -> tuple[Fraction, ...]:
        return tuple(Fraction(share) for _, share in self.sides((3,) * self.dimensions[0]))

    @property
    def dimensions(self) -> tuple[int, ...]:
        return (2, 3) if self.shapes in (_HALVES, _OWN) else super().dimensions

    def sides(self, kernel: Kernel) -> Sequence[tuple[Kernel, int | Fraction]]:
        """The sides of the filters for a dense kernel, each with its proportion."""
        if len(kernel) == 3 and self.shapes == _HALVES:
            return [(tuple(k if axis == own else 1 for axis, k in enumerate(kernel)), 1) for own in EVERY]
        if self.shapes == _OWN:
            return [(kernel, 1)]
        return [(() if shape == IDENTITY else resolve_shape(shape, kernel), n) for shape, n in self.shapes]

    def chain(self, kernel: Kernel, filters: int, channel_groups: int) -> tuple[Composite, ...]:
        parts, sides = channel_groups * self.channel_groups, self.sides(kernel)
        if self.to is None and channel_groups == filters > 1:
            return (_share_out(sides, filters, 1, depthwise=True),)
        basis = filters if self.to is None else _units(_scaled(self.m, filters), parts)
        # Thirds of 64 filters are no multiples of 8, which fast kernels need.
        thirds = len(kernel) == 3 and self.shapes == _HALVES
        whole = thirds and basis % (8 * parts) == 0 and basis >= 48 * parts
        shared = _share_out(sides, basis, 8 * parts if whole else parts)
        if self.to is None:
            return (shared,)
        return shared, Composite((FilterGroup(*[1] * len(kernel), self.out_filters(filters)),))

    @property
    def takes_depthwise(self) -> bool:
        return self.to is None and not self.branches

    def obstacle(self, layer: nn.Module) -> str:
        if reason := super().obstacle(layer):
            return reason
        assert isinstance(layer, nn.Conv2d | nn.Conv3d)
        few = layer.out_channels // (1 if is_depthwise(layer) else layer.groups) < len(self.shapes)
        if not few and self.m is None:
            scheme = self.for_layer(layer.in_channels, layer.out_channels, layer.groups)
            first, *_ = scheme.stages(layer.kernel_size, layer.out_channels, channel_groups=layer.groups)
            few = len(first.groups) < len(self.sides(layer.kernel_size))
        return f"it has too few filters for the scheme {self}" if few else ""

    def useful_rank(self, layer: nn.Module) -> int:
        assert isinstance(layer, nn.Conv2d | nn.Conv3d)
        depth, filters = layer.in_channels // layer.groups, layer.out_channels // layer.groups
        sides = self.sides(layer.kernel_size)
        first = _share_out(sides, 1000 * len(sides), 1)
        return max(ceil(min(filters, depth * g.taps) * Fraction(first.filters, g.filters)) for g in first.groups)

    def fit(self, name: str, conv: nn.Module, layer: nn.Module, known: Any = None) -> float:
        first, second = layer.children()
        basis, join = self.factors(conv)
        set_weights(first, basis)
        set_weights(second, [join])
        return kept_energy(_exact(conv), grouped_weight(basis, join, groups_of(conv)))

    def energy(self, layer: nn.Module) -> float:
        basis, join = self.factors(layer, sweeps=2)  # enough to compare numbers of filters
        return kept_energy(_exact(layer), grouped_weight(basis, join, groups_of(layer)))

    def factors(self, conv: nn.Module, *, sweeps: int = 30) -> tuple[list[Tensor], Tensor]:
        """The filters and the join nearest to a conv."""
        assert isinstance(conv, nn.Conv2d | nn.Conv3d)
        whole = self.stages(conv.kernel_size, conv.out_channels, channel_groups=conv.groups)[0]
        return grouped_factors(_exact(conv), whole, conv.groups, sweeps=sweeps)


class Dense(Basis):
    """The conv as it is; with branches, it trains beside them."""

    saves = False

    def check(self) -> None:
        if self.shapes:
            raise LowRankError("the scheme dense takes no shapes: it leaves a convolution as it is.")
        super().check()

    def sides(self, kernel: Kernel) -> Sequence[tuple[Kernel, int | Fraction]]:
        return [(kernel, 1)]


class Bands(Basis):
    """Depthwise filters of several shapes on parts of the channels; the others pass (InceptionNeXt, Yu et al.)."""

    def check(self) -> None:
        super().check()
        for shape, _ in self.shapes:
            if any(side.isdigit() and int(side) % 2 == 0 for side in shape.split("x")):
                raise LowRankError(f"filters of bands are centred on their pixel: {shape} needs odd sides.")

    def takes_shape(self, shape: str) -> bool:
        return shape == IDENTITY or super().takes_shape(shape)

    def chain(self, kernel: Kernel, filters: int, channel_groups: int) -> tuple[Composite, ...]:
        if channel_groups != filters:
            raise LowRankError(
                f"the scheme {self} is for depthwise convolutions, which have a filter per channel."
            )
        (bands,) = super().chain(kernel, filters, channel_groups)
        if len(bands.groups) < len(self.shapes):
            least = ceil(sum(share for _, share in self.shapes) / min(share for _, share in self.shapes))
            raise LowRankError(
                f"{filters} channels leave a band of {self} empty: it needs {least}, or larger shares."
            )
        if any(side % 2 == 0 for group in bands.groups for side in group.kernel):
            size = "x".join(map(str, kernel))
            raise LowRankError(f"filters of bands are centred on their pixel: a kernel of {size} needs odd sides.")
        return (bands,)

    def obstacle(self, layer: nn.Module) -> str:
        reason = Scheme.obstacle(self, layer)
        if reason or not is_depthwise(layer):
            return reason or "it is not depthwise, as bands are"
        if any(side % 2 == 0 for side in layer.kernel_size):  # type: ignore[union-attr]
            return "its kernel is even, and bands are centred on their pixel"
        try:
            self.stage_weights(layer)
        except LowRankError as error:
            return str(error).rstrip(".")
        return ""


class Channel(Basis):
    """Filters of the layer's own kernel, fewer of them, and a join. It takes layers of any kind."""

    layers = (_ConvNd, nn.Linear)

    def check(self) -> None:
        if self.shapes != (("kxk", Fraction(1)),):
            raise LowRankError("the scheme channel has filters of the layer's own kernel: it takes m alone.")
        super().check()

    def obstacle(self, layer: nn.Module) -> str:
        return "it is depthwise" if is_depthwise(layer) else ""

    def filters_of(self, layer: nn.Module) -> int:
        """The m of a layer, in whole channel groups."""
        return self.stages((1, 1), outputs_of(layer), channel_groups=groups_of(layer))[0].filters

    def build(self, layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Conv2d) or not is_torch_layer(layer):
            return super().build(layer)
        return factored_layer(layer, self.filters_of(layer), self)

    def stage_weights(self, layer: nn.Module) -> list[int]:
        m, filters = self.filters_of(layer), outputs_of(layer)
        return [layer.weight.numel() * m // filters, m * filters // groups_of(layer)]  # type: ignore[union-attr, operator]

    def macs(self, layer: nn.Module) -> int:
        basis, join = self.stage_weights(layer)
        # A transposed conv works on the pixels of its input, the join on those of its output.
        return basis + join * (prod(layer.stride) if isinstance(layer, _ConvTransposeNd) else 1)

    def useful_rank(self, layer: nn.Module) -> int:
        filters = outputs_of(layer) // groups_of(layer)
        return min(filters, layer.weight.numel() // groups_of(layer) // filters)  # type: ignore[union-attr, operator]

    def spectrum(self, layer: nn.Module) -> Tensor | None:
        return None if isinstance(layer, nn.Conv2d) else spectrum_shares(_matrices(layer))

    def fit(self, name: str, conv: nn.Module, layer: nn.Module, known: Any = None) -> float:
        if isinstance(conv, nn.Conv2d):
            return super().fit(name, conv, layer)
        basis, join = layer.children()
        matrix, groups = _matrices(conv), groups_of(conv)
        filters, mixing, energy = channel_factors(matrix, outputs_of(basis) // groups)
        if isinstance(conv, _ConvTransposeNd):
            shape = (groups, filters.shape[1], conv.in_channels // groups, *conv.kernel_size)
            filters = filters.reshape(shape).transpose(1, 2)
        set_weights(basis, [filters.reshape(basis.weight.shape)])  # type: ignore[union-attr, arg-type]
        set_weights(join, [mixing.reshape(join.weight.shape)])  # type: ignore[union-attr, arg-type]
        return energy


class Separable(Scheme):
    """Filters along one axis, then along the other (Jaderberg et al. 2014), or within frames, then along time."""

    parts = ("first", "second")
    weighs_inputs = mixes = takes_depthwise = True

    def check(self) -> None:
        super().check()
        sides = self.shapes[0][0].count("x") + 1 if self.shapes else 0
        if len(self.shapes) != 2 or not all(self.axes) or sorted(sum(self.axes, ())) != list(range(sides)):
            raise LowRankError(
                "a separable scheme has two shapes along different axes: 1xk and kx1, or 1xkxk and kx1x1."
            )

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        sides = (enumerate(shape.split("x")) for shape, _ in self.shapes)
        return tuple(tuple(axis for axis, side in own if side != "1") for own in sides)

    def chain(self, kernel: Kernel, filters: int, channel_groups: int) -> tuple[Composite, ...]:
        first, second = (resolve_shape(shape, kernel) for shape, _ in self.shapes)
        m = _units(_scaled(self.m, filters), channel_groups)
        return Composite((FilterGroup(*first, m),)), Composite((FilterGroup(*second, filters),))

    def useful_rank(self, layer: nn.Module) -> int:
        assert isinstance(layer, nn.Conv2d | nn.Conv3d)
        depth, filters = layer.in_channels // layer.groups, layer.out_channels // layer.groups
        taps = prod(resolve_shape(self.shapes[0][0], layer.kernel_size))
        return min(depth * taps, filters * prod(layer.kernel_size[axis] for axis in self.axes[1]))

    def spectrum(self, layer: nn.Module) -> Tensor | None:
        parts = _exact(layer).chunk(groups_of(layer))
        return spectrum_shares(torch.stack([unfolded(part, self.axes[0]) for part in parts]))

    def fit(self, name: str, conv: nn.Module, layer: nn.Module, known: Any = None) -> float:
        first, second = layer.children()
        target = centred(_exact(conv), layer.kernel_size)  # type: ignore[arg-type]
        options = {"axes": self.axes[0], "groups": groups_of(conv), "covariance": known}
        halves = separable_factors(target, outputs_of(first), **options)
        set_weights(first, halves[:1])
        set_weights(second, halves[1:])
        return kept_energy(_exact(conv), compose(*halves, groups=groups_of(conv)))


class CP(Scheme):
    """A 1x1, a vertical and a horizontal strip for each of its channels, and a 1x1 (Lebedev et al. 2015)."""

    parts = ("reduce", "upright", "lying", "join")
    axes = ((), (0,), (1,), ())
    inner_biases, mixes, rival = False, True, "separable"

    def check(self) -> None:
        super().check()
        if self.shapes:
            raise LowRankError("the scheme cp has strips of the layer's own kernel: it takes m alone.")

    def chain(self, kernel: Kernel, filters: int, channel_groups: int) -> tuple[Composite, ...]:
        if channel_groups > 1:
            raise LowRankError("the scheme cp takes convolutions without channel groups.")
        m = _scaled(self.m, filters)
        strips = FilterGroup(kernel[0], 1, m, depthwise=True), FilterGroup(1, kernel[1], m, depthwise=True)
        groups = (FilterGroup(1, 1, m), *strips, FilterGroup(1, 1, filters))
        return tuple(Composite((group,)) for group in groups)

    def obstacle(self, layer: nn.Module) -> str:
        grouped = groups_of(layer) > 1
        return super().obstacle(layer) or (
            "it has channel groups: the scheme separable takes it" if grouped else ""
        )

    def useful_rank(self, layer: nn.Module) -> int:
        weight: Any = layer.weight
        return weight.numel() // max(weight.shape)

    def fit(self, name: str, conv: nn.Module, layer: nn.Module, known: CPFactors | None = None) -> float:
        found = known or cp_factors(conv.weight, outputs_of(next(layer.children())))  # type: ignore[arg-type]
        if found is None:
            raise LowRankError(f"tensorly finds no CP form of {name or 'the conv'}: use separable there.")
        *tensors, energy = found
        for stage, tensor in zip(layer.children(), tensors, strict=True):
            set_weights(stage, [tensor])
        return energy


class Exact(Scheme):
    """Filters of one layer, counted by shape: what learning shapes ends with."""

    @property
    def refusal(self) -> str:
        return "exact counts the filters of one layer: use mixture, or apply learned shapes."

    def check(self) -> None:
        super().check()
        for shape, proportion in self.shapes:
            if proportion.denominator != 1:
                raise LowRankError(f"the scheme exact counts filters: {shape}={proportion} is no whole number.")

    def out_filters(self, filters: int) -> int:
        return int(sum(number for _, number in self.shapes)) or filters

    def chain(self, kernel: Kernel, filters: int, channel_groups: int) -> tuple[Composite, ...]:
        shapes = [(resolve_shape(shape, kernel), int(number)) for shape, number in self.shapes]
        return (Composite(tuple(FilterGroup(*shape, number) for shape, number in shapes or [(kernel, filters)])),)


class Learned(Scheme):
    """Filters that choose among these shapes while they train."""

    @property
    def refusal(self) -> str:
        return f"shapes are learned in training: use {to_caller('learn_shapes', '`lowrank train --scheme`')}."

    def chain(self, kernel: Kernel, filters: int, channel_groups: int) -> tuple[Composite, ...]:
        raise LowRankError(self.refusal)

    def build_form(self, form: ConvForm) -> nn.Module:
        return ShapedConv2d(form, self)


def register_scheme(scheme: Scheme, *options: str) -> Scheme:
    """Make a scheme known by its name, to `parse_scheme` and with it to every call and command of this process.

    `options` are those that its text takes in brackets: m, join, to, channel_groups, branches.

    >>> lr.register_scheme(lr.Basis("cross", (("kx1", 1), ("1xk", 1), ("1x1", 2)), to=1.0), "m")  # doctest: +SKIP
    >>> lr.convert(model, "cross(m=0.5)")  # doctest: +SKIP
    """
    if not re.fullmatch(r"[\w+-]+", scheme.name):
        raise LowRankError(f"the name of a scheme has letters, digits, -, + and _, not {scheme.name!r}.")
    if unknown := set(options) - {"join", *_FIELDS}:
        raise LowRankError(f"a scheme has no option {', '.join(sorted(unknown))}.")
    _OPTIONS[scheme.name], SCHEMES[scheme.name] = frozenset(options), scheme
    return scheme


_HALVES = (("kx1", Fraction(1)), ("1xk", Fraction(1)))
_EVERY = (*_HALVES, ("1x1", Fraction(1)), ("kxk", Fraction(1)))
_OWN = (("kxk", Fraction(1)),)

register_scheme(Dense("dense"), "branches")
register_scheme(Separable("separable", tuple(reversed(_HALVES))), "m")
register_scheme(Separable("2+1", (("1xkxk", Fraction(1)), ("kx1x1", Fraction(1)))), "m")
register_scheme(Basis("lr", _HALVES), "channel_groups", "branches")
register_scheme(Basis("lr-join", _HALVES, to=1.0), "m", "channel_groups", "branches")
register_scheme(Basis("mixture", (*_HALVES, *_OWN)), "m", "join", "channel_groups", "branches")
register_scheme(
    Bands("bands", ((IDENTITY, Fraction(5)), *((own, Fraction(1)) for own in ("3x3", "1x11", "11x1"))))
)
register_scheme(Channel("channel", _OWN, to=1.0), "m")
register_scheme(CP("cp"), "m")
register_scheme(Basis("embed", _HALVES, to=0.5), "m", "to")
register_scheme(Exact("exact"))
register_scheme(Learned("learned", _EVERY, multiple=8), "multiple")

_NUMBER = re.compile(r"[+-]?\d{0,20}(\.\d{0,20})?(e[+-]?\d{1,2})?|\d{1,20}/\d{1,20}", re.IGNORECASE)
"""Numbers that are safe to build: Python would spend minutes on 1e9999999."""
_LONGEST = 2000
"""Characters of a scheme's text."""


def parse_scheme(text: str | Scheme) -> Scheme:
    """Read a scheme from its text: `lr`, `lr-join(m=0.5)`, `mixture(kx1=3, kxk, join)`.

    >>> import lowrank_cnn as lr
    >>> str(lr.parse_scheme("mixture(kx1=3, 1xk=3, kxk=2, join)"))
    'mixture(kx1=3, 1xk=3, kxk=2, join)'
    """
    if isinstance(text, Scheme):
        return text
    if not isinstance(text, str):
        raise LowRankError(f"a scheme is a string or a Scheme, not {text!r}.")
    if len(text) > _LONGEST:
        raise LowRankError(f"a scheme is a short text; this one has {len(text):,} characters.")
    match = re.fullmatch(r"\s*([\w+-]+)\s*(?:\((.*)\))?\s*", text)
    if not match:
        raise LowRankError(f"cannot read the scheme {text!r}; write name or name(option, option=value).")
    name, inside = match[1], match[2] or ""
    shapes: dict[str, str] = {}
    options: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in inside.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        target = shapes if SHAPE.fullmatch(key) or key == IDENTITY else options
        if key in target:
            raise LowRankError(f"{key} is given twice in the scheme {text!r}.")
        target[key] = value
    check_choice("scheme", name, SCHEMES)
    default, allowed = SCHEMES[name], _OPTIONS[name]
    if unknown := set(options) - allowed:
        shaped = "" if isinstance(default, Dense) else " and shapes"
        takes = f"takes {', '.join(sorted(allowed))}{shaped}" if allowed else "takes shapes alone"
        raise LowRankError(f"the scheme {name} {takes}, not {', '.join(sorted(unknown))}.")
    found: dict[str, Any] = {key: _value(key, given) for key, given in options.items()}
    if found.pop("join", False):
        found["to"] = 1.0
    if shapes:
        found["shapes"] = tuple((shape, _fraction(value or "1")) for shape, value in shapes.items())
    return replace(default, **found)


def _value(key: str, given: str) -> bool | int | float:
    """The value of an option. An integer m is a number of filters (m=96), any other a share of d (m=0.5)."""
    if key in ("join", "branches"):
        if given:
            raise LowRankError(f"{key} takes no value in a scheme: write {key} alone.")
        return True
    number, whole = _fraction(given), bool(re.fullmatch(r"-?\d+", given))
    if not whole and key not in ("m", "to"):
        raise LowRankError(f"{key} in a scheme is a whole number, not {given}.")
    return int(number) if whole and key != "to" else float(number)


def _fraction(text: str) -> Fraction:
    try:
        number = Fraction(text) if _NUMBER.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):
        number = None
    if number is None or abs(number) > LARGEST:
        raise LowRankError(f"{text[:40]!r} in a scheme is not a number up to {LARGEST:,}.")
    return number


def _scaled(amount: int | float | None, filters: int) -> int:
    if amount is None:
        return filters
    return amount if isinstance(amount, int) else max(1, round(amount * filters))


def _units(filters: int, unit: int) -> int:
    """The nearest positive multiple of `unit`."""
    return max(1, round(filters / unit)) * unit


def _share_out(
    shapes: Sequence[tuple[tuple[int, ...], int | Fraction]], filters: int, unit: int, *, depthwise: bool = False
) -> Composite:
    """Share `filters` out by proportion, in multiples of `unit`, so that the total is kept.

    Each shape gets its whole part. The rest goes one by one to the largest remainders (first on a tie).
    """
    if filters % unit:
        raise LowRankError(f"{counted(filters, 'filter')} cannot be divided into {unit} channel groups.")
    whole, total = filters // unit, sum(proportion for _, proportion in shapes)
    exact = [Fraction(whole * proportion) / total for _, proportion in shapes]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: whole - sum(counts)]:
        counts[i] += 1
    found = [(shape, n * unit) for (shape, _), n in zip(shapes, counts, strict=True) if n]
    return Composite(tuple(FilterGroup(*shape, number, depthwise=depthwise) for shape, number in found))


def build_conv(
    in_channels: int,
    filters: int,
    kernel: int | Sequence[int],
    scheme: str | Scheme = "dense",
    *,
    stride: int | Sequence[int] = 1,
    padding: Padding = "same",
    dilation: int | Sequence[int] = 1,
    channel_groups: int = 1,
    padding_mode: str = "zeros",
    bias: bool | Literal["last"] = True,
) -> nn.Module:
    """Build the layer, or chain of layers, that replaces a dense conv under a scheme.

    A kernel of three sides, (time, height, width), is for volumes. Each layer takes the stride, padding and
    dilation of the axes that it runs along; a join takes none. With bias="last" a chain has a bias in its last
    layer alone, so that it can be merged exactly; a CP form never has another.

    >>> import torch
    >>> import lowrank_cnn as lr
    >>> layer = lr.build_conv(64, 128, 3, "lr", padding=1)
    >>> layer(torch.zeros(1, 64, 8, 8)).shape[1]
    128
    """
    scheme = parse_scheme(scheme).for_layer(in_channels, filters, channel_groups)
    sides_of_kernel = 3 if isinstance(kernel, Sequence) and len(kernel) == 3 else 2
    kernel = per_axis(kernel, "kernel", sides_of_kernel)
    stages = scheme.stages(kernel, filters, channel_groups=channel_groups)
    stride, dilation = per_axis(stride, "stride", sides_of_kernel), per_axis(dilation, "dilation", sides_of_kernel)
    sides = enclosing_padding(padding, kernel, dilation)
    layers: list[nn.Module] = []
    for place, (stage, axes) in enumerate(zip(stages, scheme.axes, strict=False)):
        first, last = place == 0, place == len(stages) - 1
        around = recentred(sides, kernel, stage.kernel, dilation)
        own = [axis in axes for axis in range(len(kernel))]  # along the other axes the stage does nothing
        options: dict[str, Any] = {
            "stride": tuple(value if here else 1 for here, value in zip(own, stride, strict=True)),
            "dilation": tuple(value if here else 1 for here, value in zip(own, dilation, strict=True)),
            "padding": tuple(value if here else (0, 0) for here, value in zip(own, around, strict=True)),
            "padding_mode": padding_mode,
            "channel_groups": 1 if stage.depthwise else channel_groups * (scheme.channel_groups if first else 1),
            "shuffle": first and last and scheme.channel_groups > 1,
            "bias": bool(bias) if last else bias is True and scheme.inner_biases,
        }
        make = branched_conv if first and scheme.branches else conv_of
        layers.append(make(in_channels if first else stages[place - 1].filters, stage, **options))
    if len(layers) == 1:
        return layers[0]
    kind = FactoredConv3d if len(kernel) == 3 else FactoredConv2d
    return kind(OrderedDict(zip(scheme.parts, layers, strict=True)), scheme)


@dataclass(frozen=True)
class Fitted(AsDict):
    """A layer: its number of basis filters, and the share of its squared weights that they keep.

    `error` is the relative squared error of the layer's output on the images that it was refitted on, if any.
    """

    name: str
    m: int
    energy: float
    error: float | None = None


@torch.no_grad()
def fit_layer(
    name: str,
    conv: nn.Module,
    layer: nn.Module,
    covariance: Tensor | None = None,
    *,
    factors: CPFactors | None = None,
) -> Fitted:
    """Give a chain that replaces a conv the filters nearest to it. It can be passed to `convert` as `init`.

    With the `covariance` of the windows that the first half of a separable pair reads, the nearest by what they
    give for such inputs. The `factors` of a CP form are computed unless given.
    """
    if is_depthwise(layer) or (isinstance(layer, CompositeConv2d) and layer.composite.depthwise):
        first = last = layer
        energy = _fit_bands(conv, layer)
    elif isinstance(layer, FactoredConv2d | FactoredLayer):
        energy = layer.scheme.fit(name, conv, layer, covariance if factors is None else factors)
        first, *_, last = layer.children()
    else:
        raise LowRankError(f"{name} was replaced by a {type(layer).__name__}, which mixes nothing: use lr-join.")
    if conv.bias is not None:
        last.bias.copy_(conv.bias)  # type: ignore[operator, union-attr]
    layer.requires_grad_(conv.weight.requires_grad)  # type: ignore[union-attr, arg-type]
    return Fitted(name, outputs_of(first), energy)


def _fit_bands(conv: nn.Module, layer: nn.Module) -> float:
    """Give each depthwise filter the taps of the trained one that it has, and return the share of energy kept.

    Channels that pass keep nothing.
    """
    one = FilterGroup(*layer.kernel_size, outputs_of(layer))  # type: ignore[misc]
    groups = layer.composite.groups if isinstance(layer, CompositeConv2d) else (one,)
    trained = _exact(conv)
    parts = zip(trained.split([group.filters for group in groups]), groups, strict=True)
    kept = [centred(part, group.kernel) for part, group in parts if group.kernel]
    set_weights(layer, kept)
    return float(sum(own.square().sum() for own in kept) / trained.square().sum().clamp_min(1e-30))


def is_depthwise(layer: nn.Module) -> bool:
    """Whether each channel of a conv is filtered by itself."""
    return isinstance(layer, _ConvNd) and layer.groups == layer.in_channels > 1


def _exact(layer: nn.Module) -> Tensor:
    return layer.weight.detach().double()  # type: ignore[union-attr, operator]


def _matrices(layer: nn.Module) -> Tensor:
    """The weight as [groups, filters of a group, everything else], in float64."""
    weight, groups = _exact(layer), groups_of(layer)
    if isinstance(layer, _ConvTransposeNd):  # [channels, filters of a group, ...]
        return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)
    return weight.flatten(1).unflatten(0, (groups, -1))
