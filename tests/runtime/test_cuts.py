"""R19, R21: attached work and wrapped commands, their connections cut at every message of either side."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chance import SEED
from crews import QUICK, Sound, Sql
from fleet import Scene, cuda, gpus, scene
from processes import CONTEXT, PATIENCE, command, finished, process, until
from proxy import Message, Proxy, nth, nth_commit
from test_waiting import Take
from work_for_workers import Model

from jayrun import Data, Operator, Runtime
from jayrun.errors import BookUnreachable
from jayrun.runtime import reconciler
from jayrun.settings import Settings
from jayrun.store import admission, leases
from jayrun.store.transactions import Book

ALL = pytest.param(None, marks=pytest.mark.slow)


class Use(Operator):
    model: Model = Model(memory_gb=10)

    def execute(self) -> Data:
        placement = self.placement.cuda(10)
        return Data(placement.host_index)


def live(url: str, connection: Any) -> None:
    """The life of a program: it opens, uses a resource that makes way for its next run, waits for its own data, and
    closes. A Runtime that cannot reach the book at once says so, and is made again."""
    while True:
        try:
            runtime = Runtime(url, settings=Settings(host_id="test-host"))
            break
        except BookUnreachable:
            connection.send("again")
    with runtime:
        assert runtime.run(Use).value == 0
        data = runtime.run(Take, memory_gb=24)
        future = runtime.start(Take, memory_gb=20)
        while not runtime._service._waits:
            time.sleep(0.01)
        del data
        assert future.result(PATIENCE).value == "taken"
        del future
        assert runtime.flush(PATIENCE)


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    with closing(Proxy(url)) as made:
        yield made


@pytest.fixture
def here(book: Book, sql: Sql) -> Scene:
    sql.execute(QUICK)
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 5")  # so that the way is about as long each time
    return scene(book, gpus(1))


def cut_everywhere(proxy: Proxy, client: str, run: Callable[[], None], sample: int | None) -> None:
    """Run it once to see how many messages there are, and then once for each that is cut; all, or a sample of each
    side, drawn by the seed."""
    seen: Counter[str] = Counter()

    def count(message: Message) -> bool:
        seen["commit"] += message.ends_transaction
        seen[message.sender] += 1
        return False

    proxy.cut(count, client=client)
    run()
    chance = random.Random(SEED)
    cuts = [(sender, number) for sender, most in sorted(seen.items()) for number in range(1, most + 1)]
    if sample is not None:
        cuts = [
            cut
            for sender in seen
            for cut in chance.sample([each for each in cuts if each[0] == sender], min(sample, seen[sender]))
        ]
    print(f"SEED={SEED} {dict(seen)} cut at {cuts}")
    fired = missed = 0
    while cuts:
        sender, number = cuts.pop(0)
        proxy.cut(nth_commit(number) if sender == "commit" else nth(sender, number), client=client)
        try:
            run()
        except BaseException:
            print(f"cut at {sender} {number}")
            raise
        fired += proxy.fired
        missed += not proxy.fired
        if sample is not None and not proxy.fired and number > 1:  # the way is not always equally long
            cuts.append((sender, number // 2))
    assert fired > missed


def nothing_left(here: Scene, sql: Sql) -> None:
    """Of a process that has ended; what it could not tell, the host's next pass does."""
    reconciler.run_pass(here.book, here.host_id)
    assert sql.execute("SELECT count(*) FROM jayrun.leases WHERE ended_at IS NULL").fetchone() == (0,)
    assert sql.execute("SELECT id FROM jayrun.holders WHERE state <> 'ended'").fetchall() == [(here.holder.id,)]
    others = "SELECT state FROM jayrun.executions WHERE ended_at IS NULL AND holder_id <> %s"
    assert sql.execute(others, (here.holder.id,)).fetchall() == []
    # However often it was asked for: one request, one lease.
    assert sql.execute("SELECT FROM jayrun.leases GROUP BY execution_id HAVING count(*) > 1").fetchall() == []


@pytest.mark.parametrize("sample", [4, ALL])
def test_the_life_of_a_program(url: str, proxy: Proxy, here: Scene, sql: Sql, sample: int | None) -> None:
    sound = Sound(sql)

    def run() -> None:
        ours, theirs = CONTEXT.Pipe()
        with process(live, proxy.url, theirs) as child:
            finished(child)
        nothing_left(here, sql)
        assert not ours.poll() or proxy.fired

    cut_everywhere(proxy, "jayrun:runtime", run, sample)
    states = sql.execute("SELECT DISTINCT state FROM jayrun.executions").fetchall()
    assert states == [("succeeded",)]
    sound.check(sql)


@pytest.mark.parametrize("sample", [2, ALL])
def test_a_wrapped_command(url: str, proxy: Proxy, here: Scene, sql: Sql, tmp_path: Path, sample: int | None) -> None:
    sound = Sound(sql)
    log = tmp_path / "log"
    environment = {"JAYRUN_DATABASE_URL": proxy.url, "JAYRUN_HOST_ID": "test-host"}
    waits = "SELECT FROM jayrun.executions WHERE state = 'waiting'"

    def run() -> None:
        blocker = here.granted(cuda(24))
        with command("run", "--memory-gb", "24", "--", "true", log=log, **environment) as child:
            until(lambda: child.poll() is not None or sql.execute(waits).fetchall())
            leases.release(here.book, here.host_id, here.holder.id, [(blocker.id, blocker.epoch)])
            admission.combine(here.book, here.host_id)
            code = child.wait(PATIENCE)
        # Who does not reach the book at the first try says so, and has begun nothing.
        assert code == 0 or (code == 125 and proxy.fired), log.read_text()
        nothing_left(here, sql)

    cut_everywhere(proxy, "jayrun:cli", run, sample)
    states = dict(sql.execute("SELECT state, count(*) FROM jayrun.executions WHERE kind = 'command' GROUP BY 1"))
    assert states.keys() == {"succeeded"}, (states, log.read_text())
    sound.check(sql)
