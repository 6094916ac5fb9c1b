"""What the README shows runs as it stands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import psycopg
from processes import PATIENCE

from jayrun.settings import child_environment

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_program_runs(url: str, tmp_path: Path) -> None:
    program, _ = blocks("python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=child_environment({"JAYRUN_DATABASE_URL": url}, without=("JAYRUN_",)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello on cuda:0\n", "")


def test_the_submitted_work_runs(url: str, tmp_path: Path) -> None:
    _, module = blocks("python")
    name = re.match(r"# (\w+)\.py\n", module)
    assert name is not None
    (tmp_path / f"{name[1]}.py").write_text(module)
    [session] = [each for each in blocks("console") if "jayrun worker" in each]
    lines = session.splitlines()
    assert lines[0] == f"$ jayrun worker {name[1]} --processes 4 &"
    submit = shlex.split(lines[1].removeprefix("$ jayrun "))
    command = [sys.executable, "-c", "from jayrun.cli.app import main; main()"]
    environment = child_environment({"JAYRUN_DATABASE_URL": url}, without=("JAYRUN_",))

    def printed(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout

    printed("devices", "declare", "--simulate", "1x24GB")
    worker = subprocess.Popen([*command, "worker", name[1]], env=environment, cwd=tmp_path)
    try:
        assert printed(*submit) == lines[2] + "\n"
        assert re.search(r"Square\s+succeeded", printed("executions", "list"))
    finally:
        worker.terminate()
        assert worker.wait(PATIENCE) == 0


def test_the_queries_run(sql: psycopg.Connection) -> None:
    [queries] = blocks("sql")
    for query in queries.strip().splitlines():
        assert sql.execute(query).description


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    named = set(re.findall(r"make ([a-z0-9-]+)", README + (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()))
    assert named >= {"demo", "test", "check"}
    assert named <= set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
