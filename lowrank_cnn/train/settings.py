"""Settings as the command line writes them, `lr=0.05`, and their values as the types of fields want them."""

from __future__ import annotations

import types
import typing

from lowrank_cnn.system.errors import LowRankError


def parse_settings(settings: list[str]) -> dict[str, str]:
    """Settings of the command line, `["lr=0.05", "crop=none"]`, as overrides for `get_recipe`."""
    pairs = [setting.partition("=") for setting in settings]
    for field, sign, _ in pairs:
        if not sign:
            raise LowRankError(f"a setting is written field=value, as in lr=0.05; {field!r} has no '='.")
    return {field.strip().replace("-", "_"): value.strip() for field, _, value in pairs}


def read_value(field: str, kind: object, value: object) -> typing.Any:
    """The value as a field of this type wants it; text is understood as the command line writes it."""
    if isinstance(kind, types.UnionType):
        if value is None or str(value).lower() in ("none", ""):
            return None
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    try:
        return _READERS[kind](value)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        wanted = getattr(kind, "__name__", kind)
        raise LowRankError(f"{field} wants a value of type {wanted}, not {value!r}.") from error


def _read_text(value: object) -> str:
    """Text, or a number that names something; several names are joined as the command line writes them."""
    if isinstance(value, list | tuple):
        return ", ".join(_read_text(one) for one in value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(value)
    return str(value)


def _read_bool(value: object) -> bool:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[str(value).lower()]


def _read_int(value: object) -> int:
    number = float(value)  # type: ignore[arg-type]
    if number != int(number):
        raise ValueError(value)
    return int(number)


def _read_numbers(value: object) -> tuple[int, ...]:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    return tuple(_read_int(item) for item in items)  # type: ignore[union-attr]


_READERS: dict[object, typing.Callable[[typing.Any], object]] = {
    str: _read_text,
    bool: _read_bool,
    int: _read_int,
    float: float,
    tuple[int, ...]: _read_numbers,
}
