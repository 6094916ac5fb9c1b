"""Gigabytes become whole bytes without float noise, and bytes become words."""

from __future__ import annotations

from fractions import Fraction
from math import inf, nan
from numbers import Integral, Real

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jayrun.domain.units import MAX_BYTES, bytes_to_gigabytes, format_bytes, gigabytes_to_bytes


class Float64:
    """A number as NumPy has them: registered as real, but no float of Python's."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        return f"Float64({self.value})"


class Int64:
    """A whole number as NumPy has them."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __int__(self) -> int:
        return self.value

    __index__ = __int__


class Bool:
    """A truth value as NumPy has them: registered as nothing."""

    def __float__(self) -> float:
        return 1.0


Real.register(Float64)
Integral.register(Int64)


@pytest.mark.parametrize(
    ("gigabytes", "memory_bytes"),
    [
        (0, 0),
        (0.0, 0),
        (-0.0, 0),
        (2, 2_000_000_000),
        (1.5, 1_500_000_000),
        (0.1 + 0.2, 300_000_000),
        (46.068, 46_068_000_000),
        (1 / 3, 333_333_333),
        (2 / 3, 666_666_666),
        (0.9999999999999999, 1_000_000_000),
        (0.9999999999, 999_999_999),
        (1e-9, 1),
        (1.9e-9, 1),
        (1e-12, 1),
        (5e-324, 1),
        (Fraction(1, 4), 250_000_000),
        (Float64(0.1 + 0.2), 300_000_000),
        (Int64(3), 3_000_000_000),
    ],
)
def test_gigabytes_are_quantised_and_rounded_down(gigabytes: object, memory_bytes: int) -> None:
    found = gigabytes_to_bytes(gigabytes, "memory_gb")
    assert found == memory_bytes
    assert type(found) is int


@pytest.mark.parametrize("value", [True, False, "2", None, 2j, [2], b"2", Bool()])
def test_what_is_no_number_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="memory_gb must be a number") as caught:
        gigabytes_to_bytes(value, "memory_gb")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (inf, "finite"),
        (-inf, "finite"),
        (nan, "finite"),
        (Float64(nan), "finite"),
        (Fraction(10**400), "finite"),
        (-1, "negative"),
        (-1e-300, "negative"),
        (Int64(-2), "negative"),
        (1e10, "at most 9223372036 gigabytes"),
        (10**30, "at most"),
    ],
)
def test_a_number_that_is_no_memory_is_a_value_error(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        gigabytes_to_bytes(value, "group_memory_gb")
    assert "group_memory_gb" in str(caught.value)
    assert repr(value) in str(caught.value)


@given(st.floats(min_value=0, max_value=9e9, exclude_min=True), st.floats(min_value=0, max_value=9e9))
def test_more_gigabytes_are_never_fewer_bytes(one: float, other: float) -> None:
    low, high = sorted([one, other])
    assert gigabytes_to_bytes(low, "low") <= gigabytes_to_bytes(high, "high")
    assert gigabytes_to_bytes(one, "one") >= 1


@given(st.integers(1, 2000 * 10**9), st.integers(1, 64))
def test_so_many_parts_never_exceed_the_whole(capacity_bytes: int, parts: int) -> None:
    whole = float(bytes_to_gigabytes(capacity_bytes))
    assert parts * gigabytes_to_bytes(whole / parts, "part") <= max(capacity_bytes, parts)


@given(st.integers(0, 10**15))
def test_bytes_written_as_gigabytes_mean_the_same_bytes(memory_bytes: int) -> None:
    assert gigabytes_to_bytes(float(bytes_to_gigabytes(memory_bytes)), "memory_gb") == memory_bytes


def test_the_most_that_can_be_asked_for_fits_the_book() -> None:
    assert gigabytes_to_bytes(9_223_372_036, "memory_gb") <= MAX_BYTES


@pytest.mark.parametrize(
    ("memory_bytes", "text"),
    [
        (0, "0 GB"),
        (1, "1 B"),
        (999, "999 B"),
        (1_500, "1.5 KB"),
        (300 * 10**6, "300 MB"),
        (333_333_333, "333.333 MB"),
        (999_999_999, "1 GB"),
        (1_500_000_000, "1.5 GB"),
        (20 * 10**9, "20 GB"),
        (46_068_000_000, "46.068 GB"),
        (1_234_567 * 10**9, "1234567 GB"),
        (-5 * 10**9, "-5 GB"),
    ],
)
def test_bytes_in_words(memory_bytes: int, text: str) -> None:
    assert format_bytes(memory_bytes) == text


@given(st.integers(1, 10**16))
def test_words_are_off_by_less_than_a_thousandth_of_their_unit(memory_bytes: int) -> None:
    number, unit = format_bytes(memory_bytes).split()
    size = {"GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}[unit]
    assert abs(Fraction(number) * size - memory_bytes) * 1000 <= size
    assert 1 <= float(number) < 1000 or unit == "GB"
