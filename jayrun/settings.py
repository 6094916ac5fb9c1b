"""The only reader of the environment: a frozen `Settings`, made once and handed down."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""The variables by which a process is shown only some devices; an empty one is not an unset one."""
VARIABLES = (
    *("JAYRUN_DATABASE_URL", "JAYRUN_HOME", "JAYRUN_HOST_ID", "JAYRUN_LABEL", "JAYRUN_PG_BINDIR"),
    *("JAYRUN_STATE_ROOT", "JAYRUN_RUN_ROOT", "JAYRUN_PROBES"),
    *("JAYRUN_LEASE", "JAYRUN_DOCKER_FLAGS"),  # told by `jayrun run` to its command
    "JAYRUN_PASSWORD",  # read by compose.yaml
)
"""All variables of jayrun's own that anything reads."""
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
"""Says by which order CUDA numbers the GPUs of the host."""
PCI_ORDER = "PCI_BUS_ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a process of jayrun was told from outside.

    `database_url`: JAYRUN_DATABASE_URL, a PostgreSQL URL; wins over every server of jayrun's own.
    `home`: JAYRUN_HOME, a folder with a server of its own, and no other server is looked for.
    `host_id`: JAYRUN_HOST_ID, this host's identity in the book (default: found by the kernel's facts).
    `label`: JAYRUN_LABEL, a free text shown beside everything this process holds.
    `lease`: JAYRUN_LEASE, the lease of the `jayrun run` that started this process, which sets it.
    `pg_bindir`: JAYRUN_PG_BINDIR, the folder with `initdb` and `postgres`.
    `data_home`: XDG_DATA_HOME, else ~/.local/share; a user's private server lives in `data_home/jayrun`.
    `state_root`: where the host's server lives, started by root (JAYRUN_STATE_ROOT, else /var/lib/jayrun).
    `run_root`: where the host's server puts its socket (JAYRUN_RUN_ROOT, else /run/jayrun).
    `probes`: JAYRUN_PROBES, fault points armed by tests (see `jayrun.probes`).
    `masks`: those of the variables in `MASKS` that are set, empty ones too.
    """

    database_url: str | None = None
    home: Path | None = None
    host_id: str | None = None
    label: str = ""
    lease: str | None = None
    pg_bindir: Path | None = None
    data_home: Path = field(default_factory=lambda: Path.home() / ".local" / "share")
    state_root: Path = Path("/var/lib/jayrun")
    run_root: Path = Path("/run/jayrun")
    probes: str = ""
    masks: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from `environ` (default: this process's environment); empty values count as unset."""
        env = os.environ if environ is None else environ

        def path(name: str) -> Path | None:
            return Path(env[name]).expanduser().absolute() if env.get(name) else None

        return cls(
            database_url=env.get("JAYRUN_DATABASE_URL") or None,
            home=path("JAYRUN_HOME"),
            host_id=env.get("JAYRUN_HOST_ID") or None,
            label=env.get("JAYRUN_LABEL", ""),
            lease=env.get("JAYRUN_LEASE") or None,
            pg_bindir=path("JAYRUN_PG_BINDIR"),
            data_home=path("XDG_DATA_HOME") or Path.home() / ".local" / "share",
            state_root=path("JAYRUN_STATE_ROOT") or Path("/var/lib/jayrun"),
            run_root=path("JAYRUN_RUN_ROOT") or Path("/run/jayrun"),
            probes=env.get("JAYRUN_PROBES", ""),
            masks={name: env[name] for name in MASKS if name in env},
        )


def given_variables() -> dict[str, str]:
    """The variables of this process's environment that look like jayrun's own, known or not."""
    return {name: value for name, value in os.environ.items() if name.startswith("JAYRUN_")}


def child_environment(updates: Mapping[str, str], *, without: tuple[str, ...] = ()) -> dict[str, str]:
    """A copy of this process's environment for a child: variables starting with a prefix in `without` left out,
    then `updates` put over it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without or ("\0",))}
    return kept | dict(updates)


def started_with(name: str) -> str | None:
    """The value that the variable `name` had when this process was executed, whatever became of it since."""
    return next(
        (value for key, _, value in (each.partition("=") for each in _first_environment()) if key == name),
        None,
    )


def device_order() -> str | None:
    """By which order CUDA is told to number the GPUs; None: by its own, the fastest first."""
    return os.environ.get(ORDER_VARIABLE)


def set_device_order(order: str) -> None:
    """Tell CUDA in this process, and in its children, by which order to number the GPUs."""
    os.environ[ORDER_VARIABLE] = order


def _first_environment() -> list[str]:
    try:
        return Path("/proc/self/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    except OSError:  # not to be read where the process may not be looked at
        return []
