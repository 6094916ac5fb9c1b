"""What a process can see of its host's devices, by the masks that it was started with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from jayrun.domain.devices import Backend
from jayrun.domain.requests import Request

Visible: TypeAlias = Mapping[str, Sequence[str]]
"""By backend, what a mask names, as a holder is registered with it: a device's UUID, or its number on the host."""

Sight: TypeAlias = tuple[tuple[Backend, frozenset[int]], ...]
"""By backend, the keys of the devices that a mask leaves to be seen; of a backend that is missing, all."""

EVERYTHING: Sight = ()

_BACKENDS = {str(backend): backend for backend in Backend}


def names_of(devices: Iterable[tuple[int, int, str | None, bool]]) -> dict[str, list[int]]:
    """What a mask may call the devices of a host, given as (key, host index, UUID, whether it is a MIG slice).

    A slice is known by its UUID only.
    """
    names: dict[str, list[int]] = {}
    for key, host_index, uuid, is_slice in devices:
        if uuid is not None:
            names.setdefault(uuid, []).append(key)
        if not is_slice:
            names.setdefault(str(host_index), []).append(key)
    return names


def sight_of(visible: Visible | None, names: Mapping[str, Sequence[int]]) -> Sight:
    """What who was registered with `visible` sees of devices of these `names`; a name that is not known is nothing."""
    return tuple(
        (_BACKENDS[backend], frozenset(key for item in items for key in names.get(item, ())))
        for backend, items in sorted((visible or {}).items())
        if backend in _BACKENDS
    )


def asked_by(requests: Iterable[Request], sight: Sight) -> tuple[Request, ...]:
    """`requests` as a process with that sight asks them."""
    if not sight:
        return tuple(requests)
    seen = dict(sight)
    return tuple(
        replace(request, among=seen[request.backend]) if request.backend in seen else request for request in requests
    )


def mask_text(visible: Visible | None, backends: Iterable[Backend]) -> dict[str, list[str]]:
    """What tells the masks of two processes apart that ask for `backends`: {} where neither hides any of them."""
    asked = set(map(str, backends))
    return {backend: sorted(set(items)) for backend, items in sorted((visible or {}).items()) if backend in asked}
