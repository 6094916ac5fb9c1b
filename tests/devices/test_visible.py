"""What masks mean, form by form: which devices of the host a process sees, and by which numbers."""

from __future__ import annotations

import pytest

from jayrun.devices.visible import Numbering, see
from jayrun.domain.devices import Backend, Device
from jayrun.domain.names import Named
from jayrun.domain.requests import Request

A, B, C = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932aaaa-0000", "GPU-b1b1b1b1-0000"
FIRST, SECOND, OTHER = "MIG-11111111-aaaa", "MIG-22222222-bbbb", "MIG-33333333-cccc"
OLD = f"MIG-{C}/1/0"
ONLY_ROCM = frozenset({Backend.ROCM})
ONLY_XPU = frozenset({Backend.XPU})


def gpu(index: int, uuid: str | None = None, **more: object) -> Named:
    return Named(host_index=index, uuid=uuid, **more)  # type: ignore[arg-type]


NAMED = (gpu(0, A), gpu(1, B), gpu(2, C))  # the book knows UUIDs
PLAIN = (gpu(0), gpu(1), gpu(2))  # it does not
SPLIT = (gpu(0, A), gpu(1, B), gpu(2, FIRST, parent_uuid=A), gpu(3, SECOND, parent_uuid=A))
ONLY_SLICES = (gpu(0, A), gpu(1, FIRST, parent_uuid=A), gpu(2, SECOND, parent_uuid=A))
AMD = tuple(gpu(index, backends=ONLY_ROCM) for index in range(4))
INTEL = tuple(gpu(index, backends=ONLY_XPU) for index in range(4))
MIXED = (gpu(0), gpu(1, backends=ONLY_ROCM), gpu(2), gpu(3, backends=ONLY_ROCM))


def cuda(mask: str | None, fleet: tuple[Named, ...], **more: object) -> list[str] | None:
    masks = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    visible = see(masks, fleet, **more).visible  # type: ignore[arg-type]
    return None if visible is None else visible.get("cuda")


@pytest.mark.parametrize(
    ("mask", "named", "plain"),
    [
        (None, None, None),
        ("", [], []),
        (" ", [], []),
        ("-1", [], []),
        ("NoDevFiles", [], []),
        ("none", [], []),
        ("all", [], []),
        ("0", [A], ["0"]),
        ("2,1", [C, B], ["2", "1"]),
        (" 2 , 1 ", [C, B], ["2", "1"]),
        ("+1", [B], ["1"]),
        ("1gpu2,2ampere", [B, C], ["1", "2"]),  # as far as there are digits
        ("0,2,-1,1", [A, C], ["0", "2"]),  # what follows the first invalid item is not seen
        ("0,,1", [A], ["0"]),
        ("1,x,0", [B], ["1"]),
        ("0,0", [], []),  # twice: nothing at all
        ("0,1,0", [], []),
        ("0,99999999999999999999,1", [A], ["0"]),
        (A, [A], [A]),  # a book that knows no UUIDs has it as one that nobody leases
        (f"{C},{A}", [C, A], [C, A]),
        ("GPU-8932f937", [A], ["GPU-8932f937"]),
        ("GPU-b", [C], ["GPU-b"]),
        ("GPU-b,GPU-8932f", [C, A], ["GPU-b", "GPU-8932f"]),
        ("GPU-8932", [], ["GPU-8932"]),  # of two: which, nobody says
        ("GPU-", [], []),
        (f"{A},GPU-8932f937", [], [A, "GPU-8932f937"]),  # the same one twice
        (f"{A},1", [A], [A]),  # of another form than the first
        (f"1,{A}", [B], ["1"]),
        (f"0,{FIRST}", [A], ["0"]),
        (FIRST, [FIRST], [FIRST]),  # the book does not have that slice, so it is one that nobody leases
        (f"{FIRST},{SECOND}", [FIRST], [FIRST]),
    ],
)
def test_a_cuda_mask(mask: str | None, named: list[str] | None, plain: list[str] | None) -> None:
    assert cuda(mask, NAMED) == named
    assert cuda(mask, PLAIN) == plain


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (None, None),
        ("2", [C]),
        ("3", []),  # the driver shows all there are: out of range is invalid
        ("1,3,0", [B]),
        ("GPU-ffff", []),
        (f"{B},GPU-ffff,{A}", [B]),
        (FIRST, []),
    ],
)
def test_a_mask_where_the_driver_shows_all(mask: str | None, seen: list[str] | None) -> None:
    assert cuda(mask, NAMED, shown=NAMED) == seen


def test_out_of_range_of_the_book_may_be_a_gpu_that_is_not_leased() -> None:
    numbering = see({"CUDA_VISIBLE_DEVICES": "7,1"}, PLAIN)
    assert numbering.lists == {Backend.CUDA: ("7", "1")}
    assert [numbering.ordinal(Device.GPU, Backend.CUDA, index, None) for index in range(3)] == [None, 1, None]


@pytest.mark.parametrize(
    ("mask", "seen", "named_by_it"),
    [
        (None, [B], None),  # whole GPUs where there are any; but a wrapper may choose a slice
        ("1", [B], [B]),
        ("0", [FIRST], [FIRST, SECOND]),  # of a GPU that is split, CUDA takes the first slice
        ("0,1", [FIRST], [FIRST, SECOND, B]),
        ("1,0", [B], [B, FIRST, SECOND]),
        ("GPU-8932f937", [FIRST], [FIRST, SECOND]),
        (f"{SECOND},{FIRST}", [SECOND], [SECOND, FIRST]),  # one alone, the first that is named
        (f"{FIRST},{FIRST}", [], []),
        (f"{SECOND},{OTHER}", [SECOND], [SECOND, OTHER]),
        ("MIG-2222", ["MIG-2222"], ["MIG-2222"]),  # names of slices are not abbreviated
        (f"MIG-{A}/3/0", [f"MIG-{A}/3/0"], [f"MIG-{A}/3/0"]),  # which of the two, the book does not know
    ],
)
def test_slices(mask: str | None, seen: list[str], named_by_it: list[str] | None) -> None:
    assert cuda(mask, SPLIT) == seen
    assert cuda(mask, SPLIT, one_slice=False) == named_by_it


def test_the_former_names_of_slices() -> None:
    assert cuda(OLD, (gpu(0, C), gpu(1, OLD, parent_uuid=C))) == [OLD]
    assert cuda(OLD, (gpu(0, C), gpu(1, FIRST, parent_uuid=C))) == [FIRST]
    assert cuda("MIG-GPU-ffff/1/0", SPLIT, shown=SPLIT) == ["MIG-GPU-ffff/1/0"]


def test_where_all_is_split_the_first_slice_is_what_cuda_takes() -> None:
    assert cuda(None, ONLY_SLICES) == [FIRST]
    assert cuda(None, ONLY_SLICES, one_slice=False) is None
    numbering = see({}, ONLY_SLICES)
    assert [numbering.ordinal(Device.GPU, Backend.CUDA, each.host_index, each.uuid) for each in ONLY_SLICES] == [
        None,
        0,
        None,
    ]
    assert cuda(None, ONLY_SLICES[:2]) == [FIRST]


def test_a_gpu_that_is_split_into_nothing_yet_has_no_number() -> None:
    assert cuda(None, NAMED, shown=(gpu(0, A, is_split=True), gpu(1, B), gpu(2, C))) == [B, C]
    assert cuda("1,0,2", NAMED, shown=(gpu(0, A, is_split=True), gpu(1, B), gpu(2, C))) == [B]


def test_in_a_container_the_uuid_decides() -> None:
    shown = (gpu(0, C), gpu(1, A))  # only two of the host's, and in another place
    numbering = see({}, NAMED, shown)
    assert numbering.visible == {"cuda": [C, A]}
    assert numbering.ordinal(Device.GPU, Backend.CUDA, 2, C) == 0
    assert numbering.ordinal(Device.GPU, Backend.CUDA, 1, B) is None
    assert numbering.host_index(Device.GPU, Backend.CUDA, 1) == 0
    assert numbering.index(Device.GPU, Backend.CUDA, 2, C) == 0
    assert cuda("1", NAMED, shown=shown) == [A]
    assert cuda("2", NAMED, shown=shown) == []
    assert cuda("1", PLAIN, shown=shown) == ["1"]  # a book without UUIDs cannot tell
    assert cuda(None, NAMED, shown=shown, one_slice=False) == [C, A]
    assert cuda(None, NAMED, shown=NAMED, one_slice=False) is None


def test_what_the_driver_shows_without_a_uuid_takes_a_number() -> None:
    numbering = see({}, NAMED, (gpu(0), gpu(1, C)))
    assert numbering.visible == {"cuda": ["unknown-0", C]}
    assert numbering.ordinal(Device.GPU, Backend.CUDA, 0, A) is None


@pytest.mark.parametrize(
    ("shown", "visible"),
    [
        ((gpu(0), gpu(1, B), gpu(2, C)), None),
        ((gpu(0), gpu(1), gpu(2)), None),
        ((gpu(0, B), gpu(1), gpu(2, C)), [B, "unknown-1", C]),  # in other places, so nobody can tell
        ((gpu(0, A), gpu(1), gpu(2, C), gpu(3)), [A, "unknown-1", C, "unknown-3"]),
    ],
)
def test_a_lost_card_that_tells_nothing_is_the_one_that_is_missed(
    shown: tuple[Named, ...], visible: list[str] | None
) -> None:
    assert cuda(None, NAMED, shown=shown) == visible


def test_a_mask_may_name_a_lost_card() -> None:
    assert cuda("1", NAMED, shown=(gpu(0, A), gpu(1), gpu(2, C))) == [B]
    assert cuda(B, NAMED, shown=(gpu(0, A), gpu(1), gpu(2, C))) == [B]


def test_what_the_book_leases_only_in_part_keeps_its_numbers() -> None:
    numbering = see({}, (gpu(3, B), gpu(5)))
    assert numbering.visible is None
    assert numbering.ordinal(Device.GPU, Backend.CUDA, 3, B) == 3
    assert numbering.host_index(Device.GPU, Backend.CUDA, 5) == 5
    assert cuda(None, (gpu(3, B),), shown=(gpu(0, A), gpu(1, C), gpu(2, "GPU-c"), gpu(3, B))) is None


@pytest.mark.parametrize(
    ("masks", "seen"),
    [
        ({}, None),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "3, 1"}, ["3", "1"]),
        ({"ROCR_VISIBLE_DEVICES": "3,x,1"}, ["3"]),
        ({"ROCR_VISIBLE_DEVICES": "3,1,3,0"}, ["3", "1"]),
        ({"ROCR_VISIBLE_DEVICES": "-1"}, []),
        ({"ROCR_VISIBLE_DEVICES": "GPU-deadbeef,0"}, ["GPU-deadbeef", "0"]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, ["2", "0"]),
        ({"HIP_VISIBLE_DEVICES": "2,2,0"}, ["2", "0"]),
        ({"HIP_VISIBLE_DEVICES": "2, 0"}, ["2"]),  # HIP takes no spaces
        ({"HIP_VISIBLE_DEVICES": ""}, None),  # and an empty mask for none
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, ["1"]),  # within what ROCR shows
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "2,0"}, []),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1,0"}, ["1", "3"]),
        ({"ROCR_VISIBLE_DEVICES": "3,GPU-deadbeef", "HIP_VISIBLE_DEVICES": "GPU-deadbeef"}, ["GPU-deadbeef"]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, ["2"]),  # counts for HIP too
        ({"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": ""}, ["2"]),
        ({"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "3,2"}, ["2"]),
    ],
)
def test_rocm_masks(masks: dict[str, str], seen: list[str] | None) -> None:
    assert (see(masks, AMD).visible or {}).get("rocm") == seen


def test_a_cuda_mask_is_no_rocm_mask_where_there_is_no_rocm_device() -> None:
    assert see({"CUDA_VISIBLE_DEVICES": "1"}, PLAIN).visible == {"cuda": ["1"]}


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        ("", None),
        ("2", ["2"]),
        ("3,1", ["1", "3"]),  # Level Zero keeps its own order
        ("0,1.0", ["0", "1"]),  # a tile stands for its card
        ("1.0,1.1", ["1"]),
        ("0.1, 2", ["0", "2"]),
        ("x,2", ["2"]),
    ],
)
def test_level_zero_masks(mask: str, seen: list[str] | None) -> None:
    assert (see({"ZE_AFFINITY_MASK": mask}, INTEL).visible or {}).get("xpu") == seen


def test_each_backend_counts_its_own_devices() -> None:
    numbering = see({"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, MIXED)
    assert numbering.visible == {"cuda": ["2"], "rocm": ["3"]}
    unlimited = see({}, MIXED)
    assert [unlimited.ordinal(Device.GPU, Backend.CUDA, index, None) for index in (0, 2)] == [0, 1]
    assert [unlimited.ordinal(Device.GPU, Backend.ROCM, index, None) for index in (1, 3)] == [0, 1]
    assert unlimited.host_index(Device.GPU, Backend.ROCM, 1) == 3
    assert unlimited.index(Device.GPU, Backend.ROCM, 3, None) == 1


def test_other_kinds_have_numbers_of_their_own() -> None:
    tpu = Named(host_index=1, kind=Device.TPU, backends=frozenset({Backend.XLA}))
    numbering = see({"CUDA_VISIBLE_DEVICES": ""}, (*PLAIN, tpu))
    assert numbering.ordinal(Device.TPU, Backend.XLA, 1, None) == 1
    assert numbering.ordinal(Device.CPU, None, 0, None) is None


def test_a_book_that_knows_nothing_yet_believes_the_mask() -> None:
    numbering = see({"CUDA_VISIBLE_DEVICES": "2,0"}, ())
    assert numbering.visible == {"cuda": ["2", "0"]}
    assert numbering.ordinal(Device.GPU, Backend.CUDA, 2, "GPU-that-is-known-later") == 0


def test_a_number_of_the_largest_kind_is_no_work() -> None:
    numbering = see({"CUDA_VISIBLE_DEVICES": "4095,4096"}, (gpu(2**31 - 1),))
    assert numbering.visible == {"cuda": ["4095"]}
    assert see({}, (gpu(2**31 - 1),)).ordinal(Device.GPU, Backend.CUDA, 2**31 - 1, None) == 2**31 - 1


def pinned(device_id: int | None) -> Request:
    return Request.single(device=Device.GPU, backend=Backend.CUDA, memory_gb=1, device_id=device_id)


def test_a_request_is_booked_by_the_number_of_the_host_and_shown_by_that_of_the_process() -> None:
    numbering = see({"CUDA_VISIBLE_DEVICES": "2,0"}, NAMED)
    assert numbering.booked(pinned(0)) == pinned(2)
    assert numbering.booked(pinned(1)) == pinned(0)
    assert numbering.issued(pinned(2)) == pinned(0)
    assert numbering.booked(pinned(None)) == numbering.issued(pinned(None)) == pinned(None)
    assert Numbering().booked(pinned(5)) == Numbering().issued(pinned(5)) == pinned(5)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("2,0", r"device_id is 2, but this process sees 2 cuda devices, 0 to 1 \(CUDA_VISIBLE_DEVICES='2,0'\)"),
        ("1", r"device_id is 2, but this process sees 1 cuda device, number 0 \(CUDA_VISIBLE_DEVICES='1'\)"),
        ("", r"device_id is 2, but this process sees 0 cuda devices \(CUDA_VISIBLE_DEVICES=''\)"),
        ("GPU-b,GPU-8932f,GPU-f", r"device_id is 2, which is GPU-f in this process .* `jayrun devices discover`"),
    ],
)
def test_a_number_that_the_process_does_not_see_is_refused(mask: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        see({"CUDA_VISIBLE_DEVICES": mask}, NAMED).booked(pinned(2))
