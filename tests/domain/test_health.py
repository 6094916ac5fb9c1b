"""What the doctor makes of what it was shown, where no machine of the tests can show it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from jayrun.domain.health import (
    Finding,
    KnownDevice,
    KnownHost,
    Remark,
    Server,
    State,
    failed,
    judge_clock,
    judge_connections,
    judge_driver,
    judge_hardware,
    judge_holders,
    judge_host,
    judge_listener,
    judge_server,
    judge_variables,
    ok,
    warning,
)
from jayrun.domain.liveness import Verdict

SERVER = Server(version=160002, version_text="16.2", is_standby=False, is_read_only=False, settings={"fsync": "on"})
GPU = KnownDevice(
    kind="gpu",
    host_index=0,
    backends=["cuda"],
    uuid="GPU-0",
    parent_uuid=None,
    capacity_bytes=24 * 10**9,
    state="online",
    fault=None,
    declared=False,
    withheld_bytes=0,
)
HOST = KnownHost(name="box", identity="abc", is_this_boot=True, silent_seconds=1, ttl_seconds=30)


def states(remarks: Iterable[Remark]) -> set[State]:
    return {each.state for each in remarks}


def test_the_worst_comes_first_and_says_what_to_do() -> None:
    found = Finding.of("it", [ok("fine"), warning("odd", "look"), failed("broken", "mend"), warning("odder", "look")])
    assert found == Finding("it", State.FAILED, "broken; odd; odder; fine", "mend; look")
    assert Finding.of("it", [ok("fine")]).next is None


@pytest.mark.parametrize(
    ("server", "state"),
    [
        (SERVER, State.OK),
        (replace(SERVER, version=130011), State.FAILED),
        (replace(SERVER, version=140000), State.OK),
        (replace(SERVER, is_standby=True, is_read_only=True), State.FAILED),
        (replace(SERVER, is_read_only=True), State.FAILED),
        (replace(SERVER, settings={"fsync": "off"}), State.WARNING),
        (replace(SERVER, settings={"synchronous_commit": "off"}), State.WARNING),
        (replace(SERVER, settings={"synchronous_commit": "local"}), State.OK),
    ],
)
def test_a_server(server: Server, state: State) -> None:
    assert Finding.of("server", judge_server(server)).state is state


def test_clocks_count_only_beyond_what_a_slow_network_explains() -> None:
    assert states(judge_clock(4.9, 0.001)) == states(judge_clock(-4.9, 0.001)) == {State.OK}
    ahead, behind = judge_clock(61, 0.001)[-1], judge_clock(-61, 0.001)[-1]
    assert ahead.state is behind.state is State.WARNING
    assert "1 m 1 s ahead of" in ahead.detail
    assert "1 m 1 s behind" in behind.detail
    slow, clock = judge_clock(5.5, 2)
    assert (slow.state, clock.state) == (State.WARNING, State.OK)


def test_connections_run_out() -> None:
    assert states(judge_connections(87, 97)) == {State.OK}
    assert states(judge_connections(88, 97)) == {State.WARNING}


def test_a_listener_that_hears_nothing() -> None:
    assert states(judge_listener(heard_seconds=0.001, is_pooled=True, poll_seconds=0.5)) == {State.OK}
    assert states(judge_listener(heard_seconds=None, is_pooled=True, poll_seconds=0.5)) == {State.WARNING}
    assert states(judge_listener(heard_seconds=None, is_pooled=False, poll_seconds=0.5)) == {State.FAILED}


@pytest.mark.parametrize(
    ("host", "state", "words"),
    [
        (HOST, State.OK, "box (abc)"),
        (replace(HOST, silent_seconds=300), State.OK, "box (abc)"),
        (replace(HOST, silent_seconds=300, live_leases=2), State.WARNING, "though it has 2 live lease(s)"),
        (replace(HOST, silent_seconds=300, is_this_boot=False), State.OK, "has restarted"),
        (replace(HOST, silent_seconds=3, is_this_boot=False), State.WARNING, "before its last restart"),
        (replace(HOST, is_this_boot=False, speaks_elsewhere=True), State.FAILED, "another machine speaks"),
        (replace(HOST, twins=["def"]), State.FAILED, "in the book as def too"),
    ],
)
def test_a_host(host: KnownHost, state: State, words: str) -> None:
    found = Finding.of("host", judge_host(host, fleeting=False))
    assert found.state is state
    assert words in found.detail


def test_an_identity_that_does_not_outlast_a_restart() -> None:
    assert states(judge_host(None, fleeting=False)) == {State.OK}
    assert "machine-id" in Finding.of("host", judge_host(None, fleeting=True)).detail


def test_holders_are_judged_by_the_kernel_first() -> None:
    assert states(judge_holders([(Verdict.ALIVE, False), (Verdict.UNSEEN, False)])) == {State.OK}
    for each in ((Verdict.DEAD, False), (Verdict.UNSEEN, True), (Verdict.ALIVE, True)):
        assert states(judge_holders([each])) == {State.OK, State.WARNING}


def test_no_driver_matters_where_there_was_one() -> None:
    problem = "the NVIDIA driver is not loaded: try `sudo modprobe nvidia`"
    by_hand = replace(GPU, uuid=None, declared=True)
    assert judge_driver(problem, has_files=False, known=[by_hand]) == [
        Remark(State.SKIPPED, "the NVIDIA driver is not loaded")
    ]
    assert states(judge_driver(problem, has_files=True, known=[])) == {State.FAILED}
    [remark] = judge_driver(problem, has_files=False, known=[GPU])
    assert (remark.state, remark.next) == (State.FAILED, "try `sudo modprobe nvidia`")


def test_the_hardware_against_the_book() -> None:
    both, gone = [GPU, replace(GPU, host_index=1, uuid="GPU-1")], ["GPU-0"]
    assert states(judge_hardware(both, ["GPU-0", "GPU-1"], sees_host=True)) == {State.OK}
    assert states(judge_hardware(both, gone, sees_host=True)) == {State.OK, State.WARNING}
    assert states(judge_hardware(both, gone, sees_host=False)) == {State.OK}
    [remark] = judge_hardware([replace(GPU, uuid=None)], ["GPU-0"], sees_host=True)
    assert "by number only" in remark.detail


def test_variables() -> None:
    known = ("JAYRUN_HOME", "JAYRUN_LABEL", "JAYRUN_DATABASE_URL")
    assert judge_variables({"JAYRUN_HOME": "x", "JAYRUN_LABEL": ""}, known) == []
    close, far = judge_variables({"JAYRUN_LABLE": "x", "JAYRUN_ZZZ": "x"}, known)
    assert "perhaps JAYRUN_LABEL is meant" in close.detail
    assert "there are JAYRUN_HOME" in far.detail
    assert far.next == "unset JAYRUN_ZZZ"
