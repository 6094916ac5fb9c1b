"""The recorded sequence: every way to depart from it is told with both sides."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fleets import group, one, sequences
from hypothesis import given
from hypothesis import strategies as st

from jayrun.domain.requests import Request
from jayrun.domain.sequence import check_complete, check_next, shape_of
from jayrun.errors import RequestSequenceChanged

TWO, FOUR, EIGHT = one(2 * 10**9), one(4 * 10**9), one(8 * 10**9)


def replay(recorded: list[Request], issued: list[Request]) -> None:
    """An invocation that issues `issued` and returns."""
    for place, request in enumerate(issued):
        check_next(recorded, issued[:place], request)
    check_complete(recorded, issued)


@given(sequences(5), sequences(5))
def test_only_the_recorded_sequence_and_what_extends_it_pass(recorded: list[Request], issued: list[Request]) -> None:
    replay(recorded, [*recorded, *issued])
    if issued[: len(recorded)] == recorded:
        replay(recorded, issued)
    else:
        with pytest.raises(RequestSequenceChanged):
            replay(recorded, issued)


@pytest.mark.parametrize(
    "issued",
    [
        pytest.param([FOUR, TWO], id="another order"),
        pytest.param([TWO, EIGHT], id="other arguments"),
        pytest.param([EIGHT, TWO, FOUR], id="one more in front"),
        pytest.param([TWO], id="one less"),
        pytest.param([], id="none"),
        pytest.param([TWO, group(4 * 10**9, 1, 1)], id="a group instead"),
    ],
)
def test_a_changed_sequence_is_told_with_both_sequences(issued: list[Request]) -> None:
    with pytest.raises(RequestSequenceChanged) as caught:
        replay([TWO, FOUR], issued)
    message = str(caught.value)
    assert TWO.describe() in message
    assert FOUR.describe() in message
    assert "recorded" in message
    assert "<-- differs" in message


def test_the_message_stands_side_by_side() -> None:
    with pytest.raises(RequestSequenceChanged) as caught:
        check_next([TWO, FOUR, EIGHT], [TWO], EIGHT)
    assert str(caught.value).splitlines() == [
        "request 2 of this invocation is not the recorded one",
        "     recorded           issued now",
        "  1  cuda(memory_gb=2)  cuda(memory_gb=2)",
        "  2  cuda(memory_gb=4)  cuda(memory_gb=8)  <-- differs",
        "  3  cuda(memory_gb=8)  (not reached)",
    ]


def test_a_return_too_early_names_what_never_came() -> None:
    with pytest.raises(RequestSequenceChanged) as caught:
        check_complete([TWO, FOUR], [TWO])
    assert str(caught.value).splitlines() == [
        "this invocation returned after 1 of 2 recorded requests",
        "     recorded           issued now",
        "  1  cuda(memory_gb=2)  cuda(memory_gb=2)",
        "  2  cuda(memory_gb=4)  (none: it returned)  <-- differs",
    ]


@given(st.lists(st.integers(1, 3), max_size=2), sequences(2), st.lists(st.integers(1, 3), max_size=2), sequences(2))
def test_shapes_are_equal_when_and_only_when_hosts_and_requests_are(
    hosts: list[int], requests: list[Request], other_hosts: list[int], others: list[Request]
) -> None:
    equal = (hosts, requests) == (other_hosts, others)
    assert (shape_of(hosts, requests) == shape_of(other_hosts, others)) == equal
    assert shape_of(tuple(hosts), tuple(requests)) == shape_of(hosts, requests)


@given(st.sampled_from([None, "", "embed", "train"]), st.sampled_from([None, "", "embed", "train"]))
def test_shapes_of_different_operators_differ(operator: str | None, other: str | None) -> None:
    assert (shape_of((1,), [TWO], operator) == shape_of((1,), [TWO], other)) == (operator == other)
    assert shape_of((1,), [TWO], None) == shape_of((1,), [TWO])


def test_a_shape_is_the_same_in_every_process() -> None:
    code = (
        "from jayrun.domain.devices import Backend, Device\n"
        "from jayrun.domain.requests import Request\n"
        "from jayrun.domain.sequence import shape_of\n"
        "print(shape_of((1, 2), [Request.single(device=Device.GPU, backend=Backend.CUDA, memory_gb=2)]))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == shape_of((1, 2), [TWO])
