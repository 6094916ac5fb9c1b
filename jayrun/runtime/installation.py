"""Whether this environment has our package, whole and alone: another distribution installs the same module name."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path

from jayrun.domain.health import Remark, failed, ok, warning

DISTRIBUTION = "jayrun-leases"
MODULE = "jayrun"
SCRIPT = "jayrun"


def judge_packages(found: Iterable[Distribution], *, imported: Path) -> Iterator[Remark]:
    """What the distributions of an environment make of the module name; `imported` is the folder of the module that
    this process has."""
    by_name: dict[str, list[Distribution]] = {}
    for each in found:
        by_name.setdefault(_normal(each.metadata["Name"] or ""), []).append(each)
    ours = by_name.pop(DISTRIBUTION, [])
    rivals = sorted(name for name, each in by_name.items() if name == MODULE or any(map(_claims_module, each)))
    pip = f"{sys.executable} -m pip"
    renewed = f"{pip} install --force-reinstall --no-deps {DISTRIBUTION}"
    if rivals:
        names = ", ".join(f"{name} {by_name[name][0].version}" for name in rivals)
        yield failed(
            f"another distribution installs the module `{MODULE}` here too: {names}; programs may get either",
            f"{pip} uninstall -y {' '.join(rivals)} && {renewed}",
        )
    if not ours:
        yield warning(
            f"{DISTRIBUTION} is not installed here; it runs from {imported}", "install it, so that its version is known"
        )
        return
    copies = [each for each in ours if Path(str(each.locate_file(""))) != imported.parent and not _is_editable(each)]
    if copies:
        places = ", ".join(f"{each.version} in {each.locate_file('')}" for each in copies)
        yield warning(
            f"another copy is on the path of Python too, and programs may get either: {places}",
            f"{pip} uninstall {DISTRIBUTION}, and look again",
        )
    spoilt = sorted(_spoilt(ours[0]))
    if spoilt:
        some = ", ".join(spoilt[:3]) + (f" and {len(spoilt) - 3} more" if len(spoilt) > 3 else "")
        yield failed(f"files of {DISTRIBUTION} are not as they were installed: {some}", renewed)
    if not rivals:
        yield ok(f"{DISTRIBUTION} {ours[0].version} is the only one that installs `{MODULE}`, from {imported}")


def judge_module(imported: Path) -> Iterator[Remark]:
    """Whether a program that is started in the current folder gets the same module."""
    spec = PathFinder.find_spec(MODULE, [str(Path.cwd()), *sys.path])
    if spec is None or (spec.origin is not None and Path(spec.origin).parent.samefile(imported)):
        return
    where = spec.origin or f"the folder {Path.cwd() / MODULE}"
    yield warning(
        f"programs in this folder import {where} instead, for Python looks beside the program first",
        "start them from another folder, or rename that one",
    )


def judge_script() -> Iterator[Remark]:
    """Whether the command `jayrun` of this shell belongs to this environment."""
    ours, found = Path(sysconfig.get_path("scripts")) / SCRIPT, shutil.which(SCRIPT)
    if found is not None and ours.exists() and not Path(found).samefile(ours):
        yield warning(
            f"the command `{SCRIPT}` on PATH is {found}, of another environment",
            f"call {ours}, or put its folder first on PATH",
        )


def environment() -> Iterator[Remark]:
    """All of it, for this process."""
    imported = Path(__file__).parents[1]
    yield from judge_packages(distributions(), imported=imported)
    yield from judge_module(imported)
    yield from judge_script()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_editable(distribution: Distribution) -> bool:
    """Whether it says no more than that the module is elsewhere."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable"))


def _claims_module(distribution: Distribution) -> bool:
    if MODULE in (distribution.read_text("top_level.txt") or "").split():
        return True
    return any(path.parts[0] in (MODULE, f"{MODULE}.py") for path in distribution.files or ())


def _spoilt(distribution: Distribution) -> Iterator[str]:
    """The files of the module that are gone or changed since they were installed (an editable install lists none)."""
    for path in distribution.files or ():
        if path.parts[0] != MODULE or path.suffix != ".py" or path.hash is None or path.hash.mode != "sha256":
            continue
        try:
            found = hashlib.sha256(Path(str(path.locate())).read_bytes()).digest()
        except OSError:
            found = b""
        if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != path.hash.value:
            yield str(path)
