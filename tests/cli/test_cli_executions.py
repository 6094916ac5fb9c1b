"""`jayrun executions` and `jayrun worker`, on real books and with real workers."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from cli_helpers import COMMAND, Jayrun, wait_for
from fleet import cuda, gpus, scene
from processes import PATIENCE, command

from jayrun.settings import child_environment
from jayrun.store import audit, claims, holders, submissions
from jayrun.store.submissions import submission
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def worker(url: str, sql: Sql) -> Iterator[subprocess.Popen[str]]:
    """One worker for the operators of the tests, ready."""
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 0.2")
    with command("worker", "work_for_workers", JAYRUN_DATABASE_URL=url) as started:
        wait_for(lambda: ready(sql), seconds=PATIENCE)
        yield started


def ready(sql: Sql) -> bool:
    rows = sql.execute("SELECT FROM jayrun.holders WHERE state = 'alive' AND operators <> '{}'").fetchall()
    return bool(rows)


def test_submit_prints_the_id_and_a_key_gives_it_again(jayrun: Jayrun, sql: Sql) -> None:
    first = jayrun("executions", "submit", "Add", "--input", "a=1", "--input", "b=[2]", "--key", "k", "--priority", "2")
    again = jayrun(
        *(
            "executions",
            "submit",
            "Add",
            "--input",
            "a=1",
            "--input",
            "b=[2]",
            "--key",
            "k",
            "--priority",
            "2",
            "--json",
        )
    )
    assert first.code == again.code == 0
    assert again.json == {"id": first.out.strip()}
    assert sql.execute("SELECT name, inputs, key, priority, state FROM jayrun.executions").fetchall() == [
        ("Add", {"a": 1, "b": [2]}, "k", 2, "ready")
    ]
    other = jayrun("executions", "submit", "Add", "--input", "a=word", "--key", "k")
    assert other.code == 1
    assert "the key 'k' belongs to execution" in other.err
    assert "priority: 2 in the book, 0 now" in other.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Add", "--input", "a"], "--input must be NAME=VALUE, not 'a'"),
        (["Add", "--input", "a-b=1"], "--input must be NAME=VALUE, not 'a-b=1'"),
        (["Add", "--input", "a=1", "--input", "a=2"], "--input a is given twice"),
        (["os.system"], "operator must be the name of a class, not 'os.system'"),
        (["Add", "--key", ""], "key must be text of 1 to 1000 bytes, not ''"),
        (["Add", "--priority", str(2**31)], "priority must be at most"),
        (["Add", "--host", "nowhere"], "no host in the book is called 'nowhere'"),
        (["Add", "--max-attempts", str(2**31)], "max_attempts must be at most"),
        (["Add", "--retry-delay", "1e300"], "retry_seconds must be from 0 to"),
        (["Add", "--backoff", "1e200"], "retry_backoff must be from 1 to 1000"),
        (["Add", "--timeout", "5"], "--timeout is for --wait"),
        (["Add", "--max-attempts", "0"], "greater than or equal to 1"),
    ],
)
def test_mistakes_are_named_and_write_nothing(jayrun: Jayrun, sql: Sql, arguments: list[str], message: str) -> None:
    told = jayrun("executions", "submit", *arguments)
    assert told.code == 2
    assert message in " ".join(told.err.replace("│", " ").split())
    assert sql.execute("SELECT count(*) FROM jayrun.executions").fetchone() == (0,)


def test_submit_and_wait(jayrun: Jayrun, worker: object, tmp_path: Path) -> None:
    done = jayrun("executions", "submit", "Add", "--input", "a=1", "--input", "b=2", "--wait")
    assert (done.code, done.out) == (0, "3\n")
    told = jayrun("executions", "submit", "Add", "--input", "a=x", "--input", "b=y", "--wait", "--json")
    assert (told.json["state"], told.json["result"], told.json["result_kind"]) == ("succeeded", "xy", "json")
    failed = jayrun("executions", "submit", "Fail", "--input", f"folder={tmp_path}", "--wait")
    assert failed.code == 1
    assert "failed: FileNotFoundError: failure 1" in failed.err
    failed = jayrun("executions", "submit", "Fail", "--input", f"folder={tmp_path}", "--wait", "--json")
    assert failed.code == 1
    assert (failed.json["state"], failed.json["failure"]["type"]) == ("failed", "FileNotFoundError")
    late = jayrun("executions", "submit", "Nobody", "--wait", "--timeout", "0")
    assert late.code == 4
    assert "still ready after 0 s and stays in the book; `jayrun why" in late.err


def test_submit_and_wait_for_the_impossible(jayrun: Jayrun, worker: object, book: Book) -> None:
    scene(book, gpus(1))
    told = jayrun("executions", "submit", "Hold", "--input", "memory_gb=30", "--wait")
    assert told.code == 3
    assert "PlacementImpossible" in told.err


def test_list_and_show(jayrun: Jayrun, worker: object, tmp_path: Path) -> None:
    jayrun("executions", "submit", "Add", "--input", "a=1", "--input", "b=2", "--wait")
    jayrun("executions", "submit", "Fail", "--input", f"folder={tmp_path}", "--wait")
    waiting = jayrun("executions", "submit", "Nobody").out.strip()
    listed = jayrun("executions", "list")
    assert [line.split()[1:3] for line in listed.out.splitlines()[1:] if line[0] != " "] == [
        ["Nobody", "ready"],
        ["Fail", "failed"],
        ["Add", "succeeded"],
    ]
    assert "FileNotFoundError: failure 1" in listed.out
    failed = jayrun("executions", "list", "--state", "failed", "--state", "cancelled", "--json").json
    assert [(row["execution"], row["attempt"]) for row in failed] == [("Fail", 1)]
    assert [row["id"] for row in jayrun("executions", "list", "--name", "Nobody", "--json").json] == [waiting]
    shown = jayrun("executions", "show", failed[0]["id"][-12:])
    assert shown.code == 0
    assert "raise FileNotFoundError" in shown.out
    assert f'{{"folder": "{tmp_path}"}}' in shown.out
    exact = jayrun("executions", "show", failed[0]["id"], "--json").json
    assert (exact["failure"]["type"], exact["state"], exact["detached"]) == ("FileNotFoundError", "failed", True)
    unknown = jayrun("executions", "show", "00000000")
    assert unknown.code == 2
    assert "no execution" in unknown.err


def test_cancel_and_retry(jayrun: Jayrun, book: Book, sql: Sql) -> None:
    execution = jayrun("executions", "submit", "Add", "--input", "a=1", "--input", "b=2").out.strip()
    assert jayrun("executions", "cancel", execution).out == "Add is cancelled\n"
    assert jayrun("executions", "cancel", execution, "--json").json["state"] == "cancelled"
    assert jayrun("executions", "retry", execution).out == "Add is ready\n"
    assert jayrun("executions", "retry", execution).out == "Add is ready\n"
    here = scene(book, gpus(1))
    attached, _ = here.reserve(cuda(1))
    told = jayrun("executions", "retry", str(attached))
    assert told.code == 1
    assert "only submitted ones can be retried" in told.err
    assert jayrun("executions", "retry", str(begun(book, "Add"))).out == "Add is running; nothing was changed\n"
    assert jayrun("executions", "cancel", str(attached)).out == "Test is asked to end\n"
    assert sql.execute(
        "SELECT cancelled_at IS NOT NULL FROM jayrun.executions WHERE id = %s", (attached,)
    ).fetchone() == (True,)


def begun(book: Book, operator: str) -> UUID:
    """An execution that a worker runs, which is this process."""
    worker = holders.register(book, holders.attest_host(book, "test-host"), role="worker")
    claims.accept(book, worker.id, [operator])
    taken = claims.take(book, worker.id).taken
    assert taken is not None
    return taken.id


def test_cancelling_a_command_that_runs_says_how_it_ends(jayrun: Jayrun, url: str, book: Book, sql: Sql) -> None:
    scene(book, gpus(1))
    with command("run", "--", "sleep", "1000", JAYRUN_DATABASE_URL=url, JAYRUN_HOST_ID="test-host") as started:
        wait_for(lambda: bool(audit.leases(book)), seconds=PATIENCE)
        [lease] = audit.leases(book)
        told = jayrun("executions", "cancel", str(lease["execution_id"]))
        assert told.out.startswith("sleep goes on: it is a command of ")
        assert f"`kill {lease['pid']}` on " in told.out
        os.kill(lease["pid"], signal.SIGTERM)
        assert started.wait(PATIENCE) == 143


def test_a_full_disk_is_told(url: str) -> None:
    environment = child_environment({"JAYRUN_DATABASE_URL": url})
    with open("/dev/full", "w") as full:
        told = subprocess.run(
            [*COMMAND, "executions", "list", "--json"],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert (told.returncode, told.stderr) == (1, "error: cannot write: No space left on device\n")


def test_a_worker_says_what_it_does(worker: subprocess.Popen[str]) -> None:
    assert worker.stderr is not None
    worker.send_signal(signal.SIGINT)
    assert worker.wait(PATIENCE) == 0
    said = worker.stderr.read()
    assert "1 worker for work_for_workers" in said
    assert "is ready and knows Add, Crash" in said
    assert "draining: what runs is finished, nothing new is taken" in said


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("no_such_module", "there is no module 'no_such_module' in"),
        ("work_for_workers.py", "'work_for_workers.py': write 'work_for_workers', as for import"),
    ],
)
def test_what_is_no_module_is_a_mistake(jayrun: Jayrun, module: str, message: str) -> None:
    told = jayrun("worker", module)
    assert told.code == 2
    assert message in told.err


def test_a_module_that_cannot_be_used_ends_the_worker(url: str) -> None:
    with command("worker", "json", "--processes", "2", JAYRUN_DATABASE_URL=url) as started:
        assert started.wait(PATIENCE) == 1
        assert started.stderr is not None
        said = started.stderr.read()
    assert "module json has no operators" in said
    assert "could not import what it should run" in said
    assert "given back" not in said.replace("a second signal gives it back", "")


def test_an_unknown_operator_is_said_at_once(jayrun: Jayrun, worker: object) -> None:
    told = jayrun("executions", "submit", "Sqaure")
    assert told.code == 0
    assert "no running worker knows Sqaure yet (those that run know Add, Crash" in told.err
    assert jayrun("executions", "submit", "Add", "--input", "a=1", "--input", "b=1").err == ""


def test_a_closed_terminal_drains(url: str, book: Book, sql: Sql, tmp_path: Path) -> None:
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 0.2")
    environment = child_environment({"JAYRUN_DATABASE_URL": url}, without=("JAYRUN_",))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(Path(__file__).parents[1])
        os.execve(COMMAND[0], [*COMMAND, "worker", "work_for_workers"], environment)
    try:
        wait_for(lambda: ready(sql), seconds=PATIENCE)
        execution = submissions.submit(book, submission("Meet", {"folder": str(tmp_path)}))
        wait_for(lambda: list(tmp_path.iterdir()), seconds=PATIENCE)
        os.close(terminal)
        (tmp_path / "go").touch()
        _, status = os.waitpid(pid, 0)
    except BaseException:
        os.killpg(pid, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(status) == 0
    assert submissions.look(book, execution).state == "succeeded"


def test_two_operators_of_one_name_are_told_apart(url: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}_module.py").write_text("import jayrun\n\nclass Same(jayrun.Operator):\n    pass\n")
    with command("worker", "one_module", "two_module", JAYRUN_DATABASE_URL=url, PYTHONPATH=str(tmp_path)) as started:
        assert started.wait(PATIENCE) == 1
        assert started.stderr is not None
        assert "two operators are named Same: one_module.Same and two_module.Same" in started.stderr.read()


def test_the_queue_shows_submitted_work(jayrun: Jayrun, worker: object, hold: Callable[..., Any]) -> None:
    jayrun("devices", "declare", "--simulate", "1x24GB")
    hold("mine", 20).wait_until_held()
    execution = jayrun("executions", "submit", "Hold", "--input", "memory_gb=10").out.strip()
    wait_for(lambda: jayrun("queue", "--json").json, seconds=PATIENCE)
    [row] = jayrun("queue", "--json").json
    assert (row["execution_id"], row["execution"], row["pid"]) == (execution, "Hold", None)
    assert "gpu 0: 4 of 24 GB free" in json.dumps(row["reason"])
    listed = jayrun("queue")
    assert "Hold" in listed.out
    why = jayrun("why", execution)
    assert why.code == 0
    assert "mine" in why.out
