"""Small checks of arguments, each naming the argument and the value it refuses."""

from __future__ import annotations

from enum import Enum
from numbers import Integral, Real
from typing import TypeVar

MAX_INDEX = 2**31 - 1
"""The largest device number that the book can hold."""

MAX_PAUSE_SECONDS = 30 * 86_400.0
"""The longest pause between two attempts, so that every instant can be written down: 30 days."""
MAX_BACKOFF = 1_000.0

_E = TypeVar("_E", bound=Enum)


def whole_number(value: object, name: str, *, minimum: int = 0, maximum: int = MAX_INDEX) -> int:
    """`value` as an int from `minimum` to `maximum`; NumPy's integers are whole numbers, a bool is not.

    Raises TypeError for another type and ValueError when it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r} ({type(value).__name__})")
    number = int(value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, but is {number}")
    if number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, but is {number}")
    return number


def number(value: object, name: str, *, minimum: float, maximum: float) -> float:
    """`value` as a float from `minimum` to `maximum`; NumPy's numbers are numbers, a bool is not.

    Raises TypeError for another type and ValueError when it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r} ({type(value).__name__})")
    if not minimum <= float(value) <= maximum:  # which NaN is not
        raise ValueError(f"{name} must be from {minimum:g} to {maximum:g}, but is {value}")
    return float(value)


def flag(value: object, name: str) -> bool:
    """`value` when it is True or False; raises TypeError for anything that is merely true or false-like."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r} ({type(value).__name__})")
    return value


def member(value: object, name: str, kind: type[_E]) -> _E:
    """`value` when it is a member of the enumeration `kind`; raises TypeError otherwise, also for its bare text."""
    if not isinstance(value, kind):
        known = ", ".join(f"{kind.__name__}.{each.name}" for each in kind)
        raise TypeError(f"{name} must be one of {known}, not {value!r} ({type(value).__name__})")
    return value
