"""Resources: set up once per process and configuration, shared, and torn down when idle in somebody's way."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from fleet import MakeRuntime, gpus
from processes import PATIENCE, until
from test_waiting import Probe, Take, parked

from jayrun import Data, Operator, Resource, RuntimeDevice
from jayrun.errors import PlacementImpossible
from jayrun.placement import Backend, Device
from jayrun.store import audit, devices, holders
from jayrun.store.transactions import Book

log: list[str] = []


@pytest.fixture(autouse=True)
def _fresh_log() -> None:
    log.clear()


class Model(Resource):
    size_gb: float = 10
    name: str = "model"

    def setup(self) -> Data:
        placement = self.placement.cuda(self.size_gb)
        log.append(f"setup {self.name}")
        return Data(f"weights of {self.name}", placement)

    def teardown(self, data: Data) -> None:
        log.append(f"teardown {self.name}")
        assert data.value == f"weights of {self.name}"


class Use(Operator):
    model: Model

    def execute(self) -> Data:
        return Data(self.model.value)


class UseAndTake(Operator):
    model: Model
    memory_gb: Data

    def execute(self) -> Data:
        own = self.placement.cuda(self.memory_gb.value)
        log.append("execute")
        return Data((self.model.value, own.memory_bytes), own)


def test_one_setup_serves_every_run_and_thread(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    futures = [runtime.start(Use) for _ in range(8)]
    assert {future.result(PATIENCE).value for future in futures} == {"weights of model"}
    assert log == ["setup model"]
    [lease] = audit.leases(book)
    assert (lease["kind"], lease["execution"], lease["memory_bytes"]) == ("resource", "Model", 10 * 10**9)


def test_the_configuration_is_part_of_the_key(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    for _ in range(2):
        assert runtime.run(Use, model=Model(name="a")).value == "weights of a"
        assert runtime.run(Use, model=Model(name="b", size_gb=2)).value == "weights of b"
    assert log == ["setup a", "setup b"]
    with pytest.raises(TypeError, match="hashable"):
        Model(name=["a"])
    with pytest.raises(TypeError, match="'colour'"):
        Model(colour="red")
    with pytest.raises(TypeError, match="must be a Model"):
        runtime.run(Use, model="a")


def test_close_tears_down_and_gives_the_capacity_back(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    runtime.run(Use)
    runtime.close()
    assert log == ["setup model", "teardown model"]
    assert audit.leases(book) == []


def test_an_idle_resource_in_the_way_is_torn_down_and_the_fewest_are(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    runtime.run(Use, model=Model(name="old", size_gb=8))
    runtime.run(Use, model=Model(name="big", size_gb=12))
    assert runtime.run(Take, memory_gb=14).value == "taken"
    assert log == ["setup old", "setup big", "teardown big"]


def test_devices_of_two_kinds_with_one_number_are_told_apart(make_runtime: MakeRuntime, book: Book) -> None:
    tpu = RuntimeDevice(Device.TPU, [Backend.XLA], 0, 24)
    runtime = make_runtime(devices=[*gpus(1), tpu])
    runtime.run(Use)
    assert runtime.run(Take, memory_gb=20, timeout=PATIENCE).value == "taken"
    assert log == ["setup model", "teardown model"]


def test_of_equals_the_least_recently_used_goes(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    for name in ("a", "b", "a"):
        runtime.run(Use, model=Model(name=name))
    runtime.run(Take, memory_gb=10)
    assert log == ["setup a", "setup b", "teardown b"]


def test_a_resource_in_use_is_not_torn_down(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    inside, go_on = threading.Event(), threading.Event()

    class Long(Operator):
        model: Model

        def execute(self) -> Data:
            inside.set()
            assert go_on.wait(PATIENCE)
            log.append("still used")
            return Data(self.model.value)

    running = runtime.start(Long)
    assert inside.wait(PATIENCE)
    waiting = runtime.start(Take, memory_gb=20)
    parked(book)
    assert log == ["setup model"]
    go_on.set()
    running.result(PATIENCE)
    assert waiting.result(PATIENCE).value == "taken"
    assert log == ["setup model", "still used", "teardown model"]


def test_what_another_released_makes_an_idle_resource_the_last_thing_in_the_way(
    make_runtime: MakeRuntime, book: Book
) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=10)
    runtime.run(Use)
    waiting = runtime.start(Take, memory_gb=24)
    parked(book)
    runtime.flush()
    assert log == ["setup model"]  # ending it alone would not do
    del blocker
    assert waiting.result(PATIENCE).value == "taken"
    assert log == ["setup model", "teardown model"]


def test_a_setup_that_waits_is_admitted_together_with_its_run(
    make_runtime: MakeRuntime, book: Book, sql: psycopg.Connection
) -> None:
    """The run needs 10 GB for its model and 14 of its own: with 10 free it gets neither, with 24 free both at once."""
    runtime = make_runtime(devices=gpus(1))
    small = runtime.run(Take, memory_gb=4)
    large = runtime.run(Take, memory_gb=14)
    future = runtime.start(UseAndTake, memory_gb=14)
    parked(book)  # the set-up waits
    del large  # enough for the model, and then not for the run
    for _ in range(200):
        waiting = audit.queue(book)
        if waiting and "+" in str(waiting[0]["asks"]):
            break
        runtime.flush()
        threading.Event().wait(0.02)
    else:
        raise AssertionError(f"the run does not wait with its set-up: {audit.queue(book)}, {log}")
    del small
    assert future.result(PATIENCE).value == ("weights of model", 14 * 10**9)
    assert log.count("execute") == 1
    assert audit.violations(book) == []


def test_a_run_and_its_resource_that_can_never_fit_together_are_told(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    with pytest.raises(PlacementImpossible) as caught:
        runtime.run(UseAndTake, memory_gb=20, timeout=20)
    assert "memory_gb=20" in str(caught.value)
    assert "memory_gb=10" in str(caught.value)
    runtime.flush()
    assert audit.queue(book) == []


def test_a_resource_of_a_resource_is_set_up_first(make_runtime: MakeRuntime, book: Book) -> None:
    class Wrapper(Resource):
        inner: Model

        def setup(self) -> Data:
            log.append(f"wrapping {self.inner.value}")
            return Data("wrapped")

    class UseWrapper(Operator):
        wrapper: Wrapper

        def execute(self) -> Data:
            return Data(self.wrapper.value)

    assert make_runtime(devices=gpus(1)).run(UseWrapper).value == "wrapped"
    assert log == ["setup model", "wrapping weights of model"]


class Wrapper(Resource):
    """Keeps another resource's data."""

    inner: Model

    def setup(self) -> Data:
        return Data("wrapped")

    def teardown(self, data: Data) -> None:
        log.append("teardown wrapper")


class UseWrapper(Operator):
    wrapper: Wrapper

    def execute(self) -> Data:
        return Data(self.wrapper.value)


def test_what_is_made_of_an_idle_resource_is_torn_down_before_it(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    runtime.run(UseWrapper)
    assert runtime.run(Take, memory_gb=24, timeout=PATIENCE).value == "taken"
    assert log == ["setup model", "teardown wrapper", "teardown model"]


def test_a_resource_is_in_use_while_what_is_made_of_it_is(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    inside, go_on = threading.Event(), threading.Event()

    class Long(Operator):
        wrapper: Wrapper

        def execute(self) -> Data:
            inside.set()
            assert go_on.wait(PATIENCE)
            log.append("still used")
            return Data(None)

    runtime.run(UseWrapper)  # so that the next run finds it cached
    running = runtime.start(Long)
    assert inside.wait(PATIENCE)
    waiting = runtime.start(Take, memory_gb=24)
    parked(book)
    go_on.set()
    assert waiting.result(PATIENCE).value == "taken"
    running.result(PATIENCE)
    assert log == ["setup model", "still used", "teardown wrapper", "teardown model"]


def test_data_that_outlives_the_teardown_is_named_and_stands_in_no_circle_of_flags(
    make_runtime: MakeRuntime, book: Book, sql: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    class Expose(Operator):
        model: Model

        def execute(self) -> Data:
            return self.model

    runtime = make_runtime(devices=gpus(1))
    kept = runtime.run(Expose)
    waiting = runtime.start(Take, memory_gb=24)
    parked(book)
    until(lambda: log == ["setup model", "teardown model"])
    until(lambda: sql.execute("SELECT FROM jayrun.executions WHERE idle_since IS NOT NULL").fetchone() is None)
    assert "Model is torn down, but user code keeps a placement of it alive" in caplog.text
    del kept
    assert waiting.result(PATIENCE).value == "taken"


def test_a_setup_that_fails_fails_the_run_and_is_tried_anew(make_runtime: MakeRuntime, book: Book) -> None:
    class Flaky(Resource):
        def setup(self) -> Data:
            placement = self.placement.cuda(1)
            log.append("try")
            if len(log) == 1:
                raise OSError("flaky")
            return Data("up", placement)

    class UseFlaky(Operator):
        flaky: Flaky

        def execute(self) -> Data:
            return Data(self.flaky.value)

    runtime = make_runtime(devices=gpus(1))
    with pytest.raises(OSError, match="flaky"):
        runtime.run(UseFlaky)
    runtime.flush()
    assert audit.leases(book) == []
    assert runtime.run(UseFlaky).value == "up"


def test_a_failing_teardown_still_gives_the_capacity_back(
    make_runtime: MakeRuntime, book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(Resource):
        def setup(self) -> Data:
            return Data("up", self.placement.cuda(20))

        def teardown(self, data: Data) -> None:
            raise OSError("no")

    class UseStubborn(Operator):
        stubborn: Stubborn

        def execute(self) -> Data:
            return Data(self.stubborn.value)

    runtime = make_runtime(devices=gpus(1))
    runtime.run(UseStubborn)
    assert runtime.run(Take, memory_gb=24).value == "taken"
    assert "teardown of Stubborn failed" in caplog.text


def test_another_thread_sets_up_what_both_wait_for(make_runtime: MakeRuntime, book: Book) -> None:
    """Two runs wait with the same set-up; the first one admitted sets it up, the second does not need it twice."""
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    futures = [runtime.start(Use, model=Model(size_gb=20)) for _ in range(2)]
    parked(book, 2)
    del blocker
    assert [future.result(PATIENCE).value for future in futures] == ["weights of model"] * 2
    values: list[Any] = log
    assert values.count("setup model") == 1


def test_inputs_are_wrapped_and_have_defaults(make_runtime: MakeRuntime) -> None:
    class WithDefault(Operator):
        left: Data
        right: Data = Data(2)

        def execute(self) -> Data:
            return Data(self.left.value + self.right.value)

    runtime = make_runtime()
    assert runtime.run(WithDefault, left=1).value == 3
    assert runtime.run(WithDefault, left=Data(1), right=5).value == 6
    assert runtime.run(Probe, body=lambda self: "cpu").placement.device_ids == ()


def test_devices_are_added_and_brought_back_but_never_altered(
    make_runtime: MakeRuntime, book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    make_runtime(devices=gpus(2))
    host_id = holders.attest_host(book, None)
    devices.remove(book, host_id, kind="gpu", host_indexes=[1])
    make_runtime(devices=gpus(2, 80))
    assert [row["capacity_bytes"] for row in audit.capacity(book)] == [24 * 10**9, 80 * 10**9]
    assert "gpu 0 is declared with 24 GB already; the 80 GB given here are ignored" in caplog.text
