"""The laws of placing: compared with brute force on small fleets, and with the contract's own examples."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from time import process_time

import pytest
from fleets import GB, any_request, booked_devices, every_plan, feasible, gpu, group, one, sequences, ways
from hypothesis import given, settings
from hypothesis import strategies as st

from jayrun.domain.devices import Backend, BookedDevice, Device, DeviceState, Share
from jayrun.domain.planner import Granted, Impossible, Unavailable, judge, plan
from jayrun.domain.requests import Request
from jayrun.domain.search import Search
from jayrun.domain.units import gigabytes_to_bytes

many = settings(max_examples=400, deadline=None)


def free(device: BookedDevice) -> int:
    return device.capacity_bytes - device.reserved_bytes - device.withheld_bytes


def island(device: BookedDevice) -> object:
    return (device.id,) if device.island is None else device.island


def by_the_rule(request: Request, devices: list[BookedDevice]) -> tuple[Share, ...] | None:
    """The contract's greedy rule, word by word: best fit, largest share first, on ties few islands, lowest index."""
    for count in request.counts():
        unused, taken, used = list(devices), [], set()
        sizes = request.shares(count)
        for place, memory_bytes in enumerate(sizes):
            open_ = [
                device
                for device in unused
                if device.state is DeviceState.ONLINE
                and device.kind is request.device
                and request.backend in device.backends
                and request.device_id in (None, device.host_index)
                and not device.exclusive
                and (
                    device.share_count == device.withheld_bytes == 0 or not (request.exclusive or device.exclusive_only)
                )
                and (request.among is None or device.id in request.among)
                and not (count > 1 and device.is_slice)
            ]
            able = [device for device in open_ if free(device) >= memory_bytes]
            if not able:
                break
            tightest = min(map(free, able))
            tied = sorted((each for each in able if free(each) == tightest), key=lambda each: each.host_index)
            # So many more are needed, besides those too small for this share that take the smaller ones.
            smaller = [size for size in sizes[place:] if size < memory_bytes]
            too_small = [each for each in open_ if sizes[-1] <= free(each) < memory_bytes]
            best = choose(tied, count - place - min(len(smaller), len(too_small)), used)
            used.add(island(best))
            unused.remove(best)
            taken.append(Share(best.id, best.host_index, memory_bytes, request.exclusive or best.exclusive_only))
        else:
            return tuple(sorted(taken, key=lambda share: share.host_index))
    return None


def choose(tied: list[BookedDevice], wanted: int, used: set[object]) -> BookedDevice:
    """The next of equally good devices, of which so many are wanted."""
    if wanted >= len(tied):
        return tied[0]
    sizes = Counter(map(island, tied))

    def preference(device: BookedDevice) -> tuple[object, ...]:
        size = sizes[island(device)]
        enough = size >= wanted
        return (island(device) not in used, not enough, size if enough else -size)

    return min(tied, key=lambda device: (*preference(device)[: 1 if island(device) in used else 3], device.host_index))


@many
@given(any_request(), booked_devices(5))
def test_one_request_is_placed_exactly_by_the_rule(request: Request, devices: list[BookedDevice]) -> None:
    expected = by_the_rule(request, devices)
    assert plan([request], devices) == (None if expected is None else (expected,))


@many
@given(any_request(), booked_devices(5))
def test_the_search_for_sets_begins_with_the_rule_for_one(request: Request, devices: list[BookedDevice]) -> None:
    assert next(Search([request], devices).plans(), None) == plan([request], devices)


@many
@given(st.integers(1, 9), st.integers(1, 6), st.lists(st.integers(0, 3) | st.none(), min_size=1, max_size=7))
def test_a_group_of_equal_devices_is_on_as_few_islands_as_can_be(
    shared: int, count: int, islands: list[int | None]
) -> None:
    devices = [gpu(index, 9, island=each) for index, each in enumerate(islands)]
    placed = plan([group(shared, count, count)], devices)
    assert (placed is None) == (count > len(devices))
    if placed is not None:
        chosen = {share.device_id for share in placed[0]}
        fewest = min(len(set(map(island, some))) for some in combinations(devices, count))
        assert len({island(device) for device in devices if device.id in chosen}) == fewest


@many
@given(any_request(), booked_devices(5))
def test_islands_decide_between_equals_only(request: Request, devices: list[BookedDevice]) -> None:
    memory = {device.id: free(device) for device in devices}

    def left_over(among: list[BookedDevice]) -> list[int] | None:
        placed = plan([request], among)
        return None if placed is None else sorted(memory[share.device_id] - share.memory_bytes for share in placed[0])

    assert left_over(devices) == left_over([replace(device, island=None) for device in devices])


@many
@given(sequences(), booked_devices())
def test_a_set_is_placed_exactly_when_there_is_a_way(requests: list[Request], devices: list[BookedDevice]) -> None:
    found = plan(requests, devices)
    assert (found is not None) == feasible(requests, devices)
    if found is not None:
        everything = {
            tuple(tuple(sorted(shares, key=lambda share: share.host_index)) for shares in way)
            for way, _ in every_plan(requests, devices)
        }
        assert found in everything


@st.composite
def tight(draw: st.DrawFn) -> tuple[list[Request], list[BookedDevice]]:
    """Many small requests for few empty devices, often with but one way to pack them, or just none."""
    sizes = st.integers(2, 5)
    devices = [gpu(index, draw(st.integers(4, 9))) for index in range(draw(st.integers(2, 3)))]
    devices += [gpu(9, draw(st.integers(4, 9)), exclusive_only=True)] * draw(st.integers(0, 1))
    singles = st.builds(one, sizes, device_id=st.sampled_from([None, None, None, 0, 1]))
    alone = st.builds(one, st.integers(0, 9), exclusive=st.just(True))
    pairs = st.builds(group, st.integers(1, 9), st.integers(1, 2), st.just(2), prefer_max_devices=st.booleans())
    requests = draw(st.lists(st.one_of(singles, singles, alone, pairs), min_size=2, max_size=5))
    return requests, devices


@settings(max_examples=1_000, deadline=None)
@given(tight())
def test_a_tight_set_is_packed_exactly_when_it_can_be(case: tuple[list[Request], list[BookedDevice]]) -> None:
    requests, devices = case
    assert (plan(requests, devices) is not None) == feasible(requests, devices)


@many
@given(any_request(), booked_devices())
def test_the_count_is_the_first_feasible_one_in_the_asked_order(request: Request, devices: list[BookedDevice]) -> None:
    counts = {len(shares) for shares, _ in ways(request, devices)}
    found = plan([request], devices)
    assert (None if found is None else len(found[0])) == next((n for n in request.counts() if n in counts), None)


@many
@given(sequences(), booked_devices(3))
def test_the_verdict_is_that_of_brute_force(requests: list[Request], devices: list[BookedDevice]) -> None:
    declared = [device.as_declared() for device in devices]
    verdict = judge(requests, devices)
    if feasible(requests, devices):
        assert verdict == Granted(plan(requests, devices))
    elif feasible(requests, declared):
        assert verdict == Unavailable()
    else:
        assert isinstance(verdict, Impossible)
        assert all(f"{device.kind} {device.host_index}: " in verdict.reason for device in devices)
        assert all(request.describe() in verdict.reason for request in requests)


@many
@given(sequences(2), sequences(2), booked_devices(3))
def test_what_is_recorded_decides_whether_it_is_impossible(
    requests: list[Request], before: list[Request], devices: list[BookedDevice]
) -> None:
    verdict = judge(requests, devices, [*before, *requests])
    possible = feasible([*before, *requests], [device.as_declared() for device in devices])
    assert isinstance(verdict, Granted) == feasible(requests, devices)
    assert isinstance(verdict, Impossible) == (not possible and not feasible(requests, devices))


@settings(max_examples=200, deadline=None)
@given(sequences(), booked_devices(), st.randoms())
def test_the_order_in_which_devices_are_given_decides_nothing(
    requests: list[Request], devices: list[BookedDevice], random: object
) -> None:
    shuffled = list(devices)
    random.shuffle(shuffled)
    assert plan(requests, devices) == plan(requests, shuffled)


@pytest.mark.parametrize("parts", range(1, 65))
@pytest.mark.parametrize("capacity_gb", [80, 46.068, 24, 0.3])
def test_equal_parts_of_a_device_always_pack(parts: int, capacity_gb: float) -> None:
    device = gpu(0, gigabytes_to_bytes(capacity_gb, "capacity"))
    share = one(gigabytes_to_bytes(capacity_gb / parts, "part"))
    assert plan([share] * parts, [device]) is not None


def test_float_noise_is_not_capacity() -> None:
    device = gpu(0, gigabytes_to_bytes(0.3, "capacity"))
    assert plan([one(gigabytes_to_bytes(0.1 + 0.2, "memory_gb"))], [device]) is not None


def test_24_times_2000_mb_do_not_fit_46068_mb() -> None:
    verdict = judge([one(2 * GB)] * 24, [gpu(0, 46_068_000_000)])
    assert isinstance(verdict, Impossible)
    assert "24 x cuda(memory_gb=2)" in verdict.reason
    assert "48 GB" in verdict.reason
    assert "gpu 0: 46.068 GB, cuda" in verdict.reason
    assert plan([one(2 * GB)] * 23, [gpu(0, 46_068_000_000)]) is not None


def test_the_group_of_the_documentation_gets_four_devices_when_it_can() -> None:
    wanted = group(8 * GB, 2, 4, each=GB, prefer_max_devices=True)
    (shares,) = plan([wanted], [gpu(index) for index in range(6)])
    assert [(share.host_index, share.memory_bytes) for share in shares] == [(index, 3 * GB) for index in range(4)]
    (shares,) = plan([wanted], [gpu(3), gpu(1), gpu(2, 4 * GB)])
    assert [(share.host_index, share.memory_bytes) for share in shares] == [
        (1, 3_666_666_667),
        (2, 3_666_666_667),
        (3, 3_666_666_666),
    ]
    assert plan([wanted], [gpu(0)]) is None


def test_best_fit_takes_the_tightest_device_and_on_ties_the_lowest_index() -> None:
    devices = [gpu(0, reserved_bytes=10 * GB), gpu(2, reserved_bytes=70 * GB), gpu(1, reserved_bytes=70 * GB)]
    assert plan([one(2 * GB)], devices) == ((Share(101, 1, 2 * GB, False),),)
    assert plan([one(11 * GB)], devices) == ((Share(100, 0, 11 * GB, False),),)


def test_an_exclusive_request_wants_a_device_without_any_lease_even_of_zero_bytes() -> None:
    busy = gpu(0, share_count=1)
    assert plan([one(GB, exclusive=True)], [busy]) is None
    assert plan([one(0, exclusive=True)], [busy, gpu(1)]) == ((Share(101, 1, 0, True),),)
    assert plan([one(GB)], [gpu(0, share_count=1, exclusive=True)]) is None


def test_an_exclusive_only_device_makes_every_share_exclusive() -> None:
    device = gpu(0, exclusive_only=True)
    assert plan([one(GB)], [device]) == ((Share(100, 0, GB, True),),)
    assert plan([one(GB), one(GB)], [device]) is None


def test_an_exclusive_request_still_needs_its_memory() -> None:
    assert isinstance(judge([one(81 * GB, exclusive=True)], [gpu(0)]), Impossible)


def test_a_device_with_more_reserved_than_it_has_takes_nothing() -> None:
    lowered = gpu(0, 10, reserved_bytes=20, share_count=2)
    assert plan([group(1, 1, 1)], [lowered]) is None
    assert judge([one(10)], [lowered]) == Unavailable()
    assert isinstance(judge([one(11)], [lowered]), Impossible)


@pytest.mark.parametrize("state", [DeviceState.DRAINING, DeviceState.OFFLINE])
def test_what_is_not_online_takes_nothing_but_counts_as_declared(state: DeviceState) -> None:
    assert judge([one(GB)], [gpu(0, state=state)]) == Unavailable()
    assert isinstance(judge([one(81 * GB)], [gpu(0, state=state)]), Impossible)


def test_a_set_backs_off_from_its_first_choice() -> None:
    # The group would rather have both devices, but one must be left for the exclusive request, and not the pinned one.
    requests = [group(4, 1, 2, prefer_max_devices=True), one(1, exclusive=True), one(6, device_id=1)]
    placed = plan(requests, [gpu(0, 10), gpu(1, 10)])
    assert placed == ((Share(101, 1, 4, False),), (Share(100, 0, 1, True),), (Share(101, 1, 6, False),))


def test_nothing_asked_is_granted() -> None:
    assert judge([], []) == Granted(())


def test_a_host_without_devices_can_never_serve() -> None:
    verdict = judge([one(GB)], [])
    assert isinstance(verdict, Impossible)
    assert (
        verdict.reason == "cuda(memory_gb=1) can never be placed: this host has no devices in the book; "
        "`jayrun devices discover` finds NVIDIA GPUs, `jayrun devices declare` adds others"
    )


def test_a_search_that_is_given_up_never_says_impossible() -> None:
    # The bytes would suffice, three pieces for most devices; to find or to exclude a way takes very long.
    devices = [gpu(index, 97 + index) for index in range(8)]
    requests = [one(size) for size in range(26, 47)]
    search = Search(requests, devices)
    started = process_time()
    assert next(search.plans(), None) is None
    assert not search.complete
    assert process_time() - started < 0.5
    assert judge(requests, devices) == Unavailable()


def test_a_sequence_of_many_requests_is_no_deep_recursion() -> None:
    devices = [gpu(index, 200) for index in range(10)]
    assert plan([one(1)] * 2_000, devices) is not None


@pytest.mark.parametrize(
    ("requests", "devices"),
    [
        pytest.param([group(0, 4, 4, exclusive=True)] * 4, [gpu(index) for index in range(15)], id="equal devices"),
        pytest.param([one(14)] * 5 + [one(9)] * 17, [gpu(index, 30) for index in range(8)], id="equal requests"),
        pytest.param([one(10)] * 17, [gpu(index, 22 + index) for index in range(8)], id="unequal devices"),
        pytest.param(
            [one(13)] * 6 + [one(11)] + [one(7)] * 4,
            [gpu(index, capacity) for index, capacity in enumerate((30, 30, 32, 31))],
            id="the same in another order",
        ),
        pytest.param(
            [one(1)] * 9,
            [gpu(index, 80 + index, exclusive_only=True) for index in range(8)],
            id="exclusive-only devices",
        ),
    ],
)
def test_what_looks_alike_is_tried_once(requests: list[Request], devices: list[BookedDevice]) -> None:
    # Tried one by one, these are billions of ways; the bytes alone would suffice.
    started = process_time()
    assert isinstance(judge(requests, devices), Impossible)
    assert process_time() - started < 0.5


def test_a_group_with_too_few_devices_is_not_tried_in_every_way() -> None:
    # 10 large shares fit 19 devices in 92,378 ways, but there is never a twentieth device for the last small one.
    devices = [gpu(index, 60 + index) for index in range(19)] + [gpu(19 + index, 1) for index in range(9)]
    started = process_time()
    assert isinstance(judge([group(20 * 50 + 10, 20, 21), one(1)], devices), Impossible)
    assert plan([group(20 * 50 + 10, 20, 21), one(1)], devices) is None
    assert process_time() - started < 0.5


def test_other_kinds_and_backends_are_no_candidates() -> None:
    devices = [gpu(0, kind=Device.TPU, backends=frozenset({Backend.XLA})), gpu(1, backends=frozenset({Backend.ROCM}))]
    verdict = judge([one(GB)], devices)
    assert isinstance(verdict, Impossible)
    assert "tpu 0: 80 GB, xla: no gpu" in verdict.reason
    assert "gpu 1: 80 GB, rocm: no cuda" in verdict.reason


def pairs(**facts: object) -> list[BookedDevice]:
    """Eight equal GPUs, each two of them linked by NVLink: 0 and 4, 1 and 5, and so on; device N with those facts."""
    return [gpu(index, island=index % 4, **facts.get(f"gpu{index}", {})) for index in range(8)]


def indexes(placed: tuple[tuple[Share, ...], ...] | None) -> list[int]:
    assert placed is not None
    return [share.host_index for shares in placed for share in shares]


@pytest.mark.parametrize("shared", [40 * GB, 40 * GB + 1])
def test_two_devices_are_a_linked_pair_and_four_are_two_pairs(shared: int) -> None:
    assert indexes(plan([group(shared, 2, 2)], pairs())) == [0, 4]
    assert indexes(plan([group(shared, 4, 4)], pairs())) == [0, 1, 4, 5]
    twice = [group(shared, 2, 2, exclusive=True)] * 2
    assert indexes(plan(twice, pairs())) == [0, 4, 1, 5]


def test_a_pair_of_which_one_is_busy_is_left_for_who_asks_for_one() -> None:
    devices = pairs(gpu0={"share_count": 1, "exclusive": True})
    assert indexes(plan([group(40 * GB, 2, 2)], devices)) == [1, 5]
    # The third device is the one whose partner is busy, and no pair is broken for it.
    assert indexes(plan([group(40 * GB, 3, 3)], devices)) == [1, 4, 5]
    full = [gpu(index, island=index % 4, reserved_bytes=80 * GB * (index in (0, 5))) for index in range(8)]
    assert indexes(plan([group(40 * GB, 2, 2)], full)) == [2, 6]


def test_the_tightest_devices_come_before_linked_ones() -> None:
    devices = pairs(gpu0={"reserved_bytes": 20 * GB}, gpu1={"reserved_bytes": 30 * GB})
    assert indexes(plan([group(40 * GB, 2, 2)], devices)) == [0, 1]
    # One tight device is taken by the rule, and the other one is its partner.
    assert indexes(plan([group(40 * GB, 2, 2)], pairs(gpu7={"reserved_bytes": 30 * GB}))) == [3, 7]


def slices(count: int, capacity_bytes: int = 10 * GB) -> list[BookedDevice]:
    return [gpu(10 + index, capacity_bytes, is_slice=True) for index in range(count)]


def test_a_plan_with_a_slice_has_nothing_else() -> None:
    devices = [*slices(7), gpu(0)]
    assert indexes(plan([one(8 * GB)], devices)) == [10]
    assert indexes(plan([one(4 * GB), one(4 * GB)], devices)) == [10, 10]
    assert indexes(plan([one(8 * GB), one(8 * GB)], devices)) == [0, 0]
    assert plan([group(8 * GB, 2, 2)], devices) is None
    assert indexes(plan([group(8 * GB, 1, 2, prefer_max_devices=True)], devices)) == [10]
    assert plan([one(4 * GB, device_id=10), one(4 * GB, device_id=11)], devices) is None
    verdict = judge([one(8 * GB)] * 2, slices(7))
    assert isinstance(verdict, Impossible)
    assert "gpu 10: 10 GB, cuda: MIG slice: a process gets one alone" in verdict.reason
    verdict = judge([group(8 * GB, 2, 2)], slices(7))
    assert isinstance(verdict, Impossible)
    assert "gpu 16: 10 GB, cuda: MIG slice: a process gets one alone" in verdict.reason


def test_many_slices_are_no_long_search() -> None:
    devices = [gpu(index, 10 + index, reserved_bytes=index, is_slice=True) for index in range(56)]
    started = process_time()
    assert isinstance(judge([one(9)] * 16, devices), Impossible)
    assert process_time() - started < 0.5


def test_groups_on_islands_are_no_long_search() -> None:
    devices = [gpu(index, 60 + index // 4, island=index // 4) for index in range(32)]
    started = process_time()
    assert isinstance(judge([group(50 * 3 + 1, 3, 3, exclusive=True)] * 11, devices), Impossible)
    assert process_time() - started < 0.5


def test_what_is_withheld_is_not_granted_but_may_come_back() -> None:
    device = gpu(0, 80, 30, withheld_bytes=20)
    assert plan([one(30)], [device]) is not None
    assert judge([one(31)], [device]) == Unavailable()
    assert judge([one(80)], [device]) == Unavailable()
    assert isinstance(judge([one(81)], [device]), Impossible)
    assert judge([one(1, exclusive=True)], [gpu(0, 80, withheld_bytes=1)]) == Unavailable()
    assert gpu(0, 10, 8, withheld_bytes=8).free_bytes == -6
    assert plan([one(1)], [gpu(0, 10, 8, withheld_bytes=8)]) is None


def test_a_mask_hides_devices_from_one_process_only() -> None:
    devices = [gpu(0, 80, 10), gpu(1, 80)]
    assert indexes(plan([one(10, among=frozenset({101}))], devices)) == [1]
    assert plan([group(2, 2, 2, among=frozenset({101}))], devices) is None
    verdict = judge([one(10, among=frozenset())], devices)
    assert isinstance(verdict, Impossible)
    assert "gpu 1: 80 B, cuda: not visible to the process (its mask: cuda nothing)" in verdict.reason
    assert indexes(plan([one(40, among=frozenset({101})), one(70)], devices)) == [1, 0]
