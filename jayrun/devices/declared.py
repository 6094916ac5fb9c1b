"""Device files: TOML with a `[[device]]` table for each device, every mistake named by file, line and key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from jayrun.domain.checks import flag, whole_number
from jayrun.domain.devices import Backend, Device, RuntimeDevice, accelerator
from jayrun.domain.units import gigabytes_to_bytes, plain_number
from jayrun.errors import DeviceFileError

_OPTIONAL = {"exclusive_only"}
_HEAD = re.compile(r"""\s*\[\[\s*["']?device["']?\s*\]\]""")


def load_devices(path: Path) -> list[RuntimeDevice]:
    """The devices that the file declares, in its order.

    A table has exactly the keys `device`, `backends`, `device_id`, `memory_limit_gb`, and may have `exclusive_only`.
    Raises `DeviceFileError` saying where the mistake is and what is allowed there.
    """
    file = _File(path)
    if unknown := sorted(set(file.content) - {"device"}):
        raise file.mistake(f"unknown key {unknown[0]!r}: only [[device]] tables are allowed", file.line_of(unknown[0]))
    tables = file.content.get("device")
    if tables is None:
        raise file.mistake("declares nothing: write a [[device]] table for each device")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise file.mistake("device must be a list of tables: write [[device]] before each", file.line_of("device"))
    if not tables:
        raise file.mistake("declares nothing: write a [[device]] table for each device", file.line_of("device"))
    devices: list[RuntimeDevice] = []
    for number, table in enumerate(tables):
        device = _read(file, number, table)
        for earlier, other in enumerate(devices):
            if (other.device, other.device_id) == (device.device, device.device_id):
                first = file.line_of("device_id", earlier)
                raise file.mistake(
                    f"device_id {device.device_id} of kind {device.device} is declared twice"
                    + (f", first in line {first}" if first else ""),
                    file.line_of("device_id", number),
                )
        devices.append(device)
    return devices


class _File:
    """A parsed file, and where in its text things are: the parser keeps no lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            text = path.read_bytes().decode()
        except OSError as error:
            raise self.mistake(f"cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise self.mistake("is not UTF-8 text, as TOML must be", line) from error
        self._lines = text.splitlines()
        try:
            self.content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # among them the limits of Python's own parser
            at = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(error))
            line = int(at[1]) if at and at[1] else max(len(self._lines), 1)
            words = str(error)[: at.start()] if at else str(error)
            raise self.mistake(f"is not TOML: {words[:1].lower()}{words[1:]}", line) from error

    def mistake(self, what: str, line: int | None = None) -> DeviceFileError:
        return DeviceFileError(f"{self._path}, line {line}: {what}" if line else f"{self._path}: {what}")

    def line_of(self, key: str, table: int | None = None) -> int | None:
        """The line where `key` is set in the `table`-th [[device]], or at the top; that of the table if it lacks it.

        None where the file is written in another form than tables over lines.
        """
        heads = [at for at, line in enumerate(self._lines) if _HEAD.match(line)]
        quoted = rf"""["']?{re.escape(key)}["']?\s*"""
        assigned = re.compile(rf"\s*{quoted}[=.]")
        if table is None:
            table_named = re.compile(rf"\s*\[+\s*{quoted}[\].]")
            top = heads[0] if heads else len(self._lines)
            return next(
                (
                    at + 1
                    for at, line in enumerate(self._lines)
                    if table_named.match(line) or (at < top and assigned.match(line))
                ),
                None,
            )
        if table >= len(heads):
            return None
        begin, end = heads[table], [*heads, len(self._lines)][table + 1]
        return next((at + 1 for at in range(begin, end) if assigned.match(self._lines[at])), begin + 1)


def _read(file: _File, number: int, table: dict[str, Any]) -> RuntimeDevice:
    if unknown := sorted(set(table) - set(_READERS)):
        allowed = ", ".join(_READERS)
        raise file.mistake(
            f"unknown key {unknown[0]!r} in [[device]]: allowed are {allowed}", file.line_of(unknown[0], number)
        )
    if missing := [key for key in _READERS if key not in table and key not in _OPTIONAL]:
        raise file.mistake(f"[[device]] lacks the key {missing[0]!r}", file.line_of(missing[0], number))
    values = {}
    for key, value in table.items():
        try:
            values[key] = _READERS[key](value)
        except (TypeError, ValueError) as error:
            raise file.mistake(str(error), file.line_of(key, number)) from error
    return RuntimeDevice(**values)


def _kind(value: object) -> Device:
    return accelerator(Device(_word(value, "device", Device)))


def _backends(value: object) -> list[Backend]:
    if not isinstance(value, list) or not value:
        raise TypeError(f"backends must be a list of one or more of {_listed(Backend)}, not {value!r}")
    return [Backend(_word(each, "backends", Backend)) for each in value]


def _memory(value: object) -> int | float:
    if gigabytes_to_bytes(value, "memory_limit_gb") == 0:
        raise ValueError(f"memory_limit_gb must be positive, but is {value!r}")
    return plain_number(value, "memory_limit_gb")


def _word(value: object, key: str, kind: type[StrEnum]) -> str:
    if not isinstance(value, str) or value not in [each.value for each in kind]:
        raise ValueError(f"{key} must be one of {_listed(kind)}, not {value!r}")
    return value


def _listed(kind: type[StrEnum]) -> str:
    return ", ".join(f'"{each.value}"' for each in kind if each is not Device.CPU)


_READERS: dict[str, Callable[[object], Any]] = {
    "device": _kind,
    "backends": _backends,
    "device_id": partial(whole_number, name="device_id"),
    "memory_limit_gb": _memory,
    "exclusive_only": partial(flag, name="exclusive_only"),
}
