"""Memory at the front door: decimal gigabytes for people, whole bytes everywhere behind it. And spans of time."""

from __future__ import annotations

from fractions import Fraction
from math import floor, inf, isfinite
from numbers import Integral, Real

GIGABYTE = 10**9
"""Bytes in one (decimal) gigabyte."""

MAX_BYTES = 2**63 - 1
"""The most bytes one argument may stand for: what a bigint of the book can hold."""


def gigabytes_to_bytes(value: object, name: str) -> int:
    """Turn `value` decimal gigabytes into whole bytes; `name` is the argument that messages speak of.

    The number is first quantised to 15 significant digits, because float noise is not capacity (0.1 + 0.2 is 0.3),
    and then rounded down, so that k requests of 1/k always pack; but what is positive stays at least 1 byte.

    Raises TypeError when `value` is no real number (a bool is none), and ValueError when it is not finite, negative, or
    more than a device could ever be recorded with.
    """
    gigabytes = plain_number(value, name)
    if isinstance(gigabytes, float) and not isfinite(gigabytes):
        raise ValueError(f"{name} must be finite, not {value!r}")
    if gigabytes < 0:
        raise ValueError(f"{name} must not be negative, but is {value!r}")
    if gigabytes == 0:
        return 0
    exact = gigabytes if isinstance(gigabytes, int) else Fraction(f"{gigabytes:.15g}")
    memory_bytes = max(1, floor(exact * GIGABYTE))
    if memory_bytes > MAX_BYTES:
        raise ValueError(f"{name} must be at most {MAX_BYTES // GIGABYTE} gigabytes, but is {value!r}")
    return memory_bytes


def plain_number(value: object, name: str) -> int | float:
    """`value`, a real number of any type (NumPy's too), as int or float; raises TypeError for others and for a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r} ({type(value).__name__})")
    if isinstance(value, Integral):
        return int(value)
    try:
        return float(value)
    except OverflowError:  # a fraction beyond every float is as good as infinite
        return inf


def bytes_to_gigabytes(memory_bytes: int) -> str:
    """The exact decimal number of gigabytes, as one would write it in a call: `2`, `0.3`, `0.333333333`."""
    whole, rest = divmod(memory_bytes, GIGABYTE)
    return f"{whole}.{rest:09d}".rstrip("0").rstrip(".")


def format_bytes(n: int) -> str:
    """`n` bytes for people, decimal and rounded to three places: `20 GB`, `1.5 GB`, `300 MB`, `0 GB`."""
    if n < 0:
        return f"-{format_bytes(-n)}"
    for unit, size in (("GB", GIGABYTE), ("MB", 10**6), ("KB", 10**3)):
        # What would round up to 1000 of a smaller unit is already 1 of the larger one.
        if n == 0 or n * 2000 >= size * 1999:
            thousandths = (n * 2000 + size) // (size * 2)
            return f"{thousandths // 1000}.{thousandths % 1000:03d}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{n} B"


def format_seconds(seconds: float) -> str:
    """A span of time for people, in its two largest units, cut off: `12 s`, `3 m 12 s`, `2 h 5 m`, `3 d 4 h`."""
    rest = max(int(seconds), 0)
    parts: list[tuple[int, str]] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or parts or unit == "s":
            parts.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count or len(parts) == 1)
