"""What masks name is turned into devices of the book, and what is hidden from a process is no candidate for it."""

from __future__ import annotations

from fleets import GB, gpu, one

from jayrun.domain.devices import Backend
from jayrun.domain.planner import Unavailable, judge
from jayrun.domain.sequence import check_next, shape_of
from jayrun.domain.visible import EVERYTHING, asked_by, names_of, sight_of

# Two whole GPUs, a TPU with the number of the first, and a slice.
NAMES = names_of([(10, 0, "GPU-a", False), (11, 1, "GPU-b", False), (12, 0, None, False), (13, 2, "MIG-c", True)])


def test_a_mask_names_devices_by_uuid_or_number_and_a_slice_by_uuid_only() -> None:
    assert sight_of({"cuda": ["GPU-b", "0"]}, NAMES) == ((Backend.CUDA, frozenset({10, 11, 12})),)
    assert sight_of({"cuda": ["2"]}, NAMES) == ((Backend.CUDA, frozenset()),)
    assert sight_of({"cuda": ["MIG-c", "GPU-unknown", "77"]}, NAMES) == ((Backend.CUDA, frozenset({13})),)
    assert sight_of({"xpu": [], "vulkan": ["0"]}, NAMES) == ((Backend.XPU, frozenset()),)
    assert sight_of(None, NAMES) == sight_of({}, NAMES) == EVERYTHING


def test_a_mask_concerns_the_requests_of_its_backend() -> None:
    sight = sight_of({"cuda": ["GPU-a"]}, NAMES)
    masked, other = asked_by([one(1), one(1, backend=Backend.OPENCL)], sight)
    assert masked.among == frozenset({10})
    assert other.among is None
    assert asked_by([one(1)], EVERYTHING) == (one(1),)


def test_what_a_process_sees_is_no_part_of_what_it_asks() -> None:
    masked = one(GB, among=frozenset({100}))
    assert masked == one(GB)
    assert masked.to_json() == one(GB).to_json()
    assert masked.describe() == one(GB).describe()
    check_next([one(GB)], [], masked)
    assert judge([masked], [gpu(0, share_count=1, exclusive=True), gpu(1)]) == Unavailable()


def test_waiters_of_different_masks_are_no_equals_unless_the_masks_hide_nothing_of_what_they_ask() -> None:
    plain = shape_of((1,), [one(1)])
    assert shape_of((1,), [one(1)], visible=None) == plain
    assert shape_of((1,), [one(1)], visible={"rocm": ["0"]}) == plain
    first = shape_of((1,), [one(1)], visible={"cuda": ["GPU-a", "GPU-b"]})
    assert first == shape_of((1,), [one(1)], visible={"cuda": ["GPU-b", "GPU-a"], "xpu": []})
    assert len({plain, first, shape_of((1,), [one(1)], visible={"cuda": []})}) == 3
    assert shape_of((1,), [one(1)], "Embed", {"cuda": ["0"]}) == shape_of((1,), [one(1)], "Embed")
