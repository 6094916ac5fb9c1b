"""`self.placement`: the door through which an invocation asks for capacity."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, cast

from jayrun.domain.devices import Backend, Device
from jayrun.domain.placements import Placement, PlacementGroup, PlacementLocation
from jayrun.domain.requests import Request
from jayrun.errors import ConcurrentRequests, PlacementSignalSwallowed, PlacementUnavailableHere
from jayrun.runtime.work import Invocation

SWALLOWED = (
    "the signal that ends a waiting invocation was caught by user code in {name}: look for `except:`, "
    "`except BaseException`, `finally: return`, `contextlib.suppress(BaseException)` or a thread around the placement "
    "request, and let the signal pass"
)


class PlacementInterface:
    """Requests accelerator capacity for the current invocation; see `Operator.placement`.

    Issue all requests first, in the same order on every invocation: when capacity is not free, the call does not
    return, the invocation ends, and a later one starts from the beginning with everything granted.
    """

    __slots__ = ("_answer", "_invocation", "_pid")

    def __init__(self, invocation: Invocation, answer: Callable[[Invocation, Request], PlacementLocation]) -> None:
        self._invocation = invocation
        self._answer = answer
        self._pid = os.getpid()

    def reserve(
        self,
        *,
        device: Device,
        backend: Backend,
        memory_gb: int | float,
        exclusive: bool = False,
        device_id: int | None = None,
    ) -> Placement:
        """Reserve `memory_gb` decimal gigabytes on one device.

        `exclusive`: the device carries nothing else (then `memory_gb` may be 0). `device_id`: this device and no other.
        Raises TypeError and ValueError for bad arguments, `PlacementImpossible` when the declared devices could never
        satisfy what this execution asks for, `RequestSequenceChanged` when it differs from what was recorded.
        """
        request = Request.single(
            device=device, backend=backend, memory_gb=memory_gb, exclusive=exclusive, device_id=device_id
        )
        return cast(Placement, self._ask(request))

    def reserve_group(
        self,
        *,
        device: Device,
        backend: Backend,
        group_memory_gb: int | float = 0,
        per_device_memory_gb: int | float = 0,
        max_devices: int,
        min_devices: int = 1,
        prefer_max_devices: bool = False,
        exclusive: bool = False,
    ) -> PlacementGroup:
        """Reserve between `min_devices` and `max_devices` devices of one kind on one host, all of them or none.

        `group_memory_gb` decimal gigabytes are divided among the devices, `per_device_memory_gb` come on top for each.
        Raises as `reserve` does.
        """
        request = Request.of_group(
            device=device,
            backend=backend,
            group_memory_gb=group_memory_gb,
            per_device_memory_gb=per_device_memory_gb,
            max_devices=max_devices,
            min_devices=min_devices,
            prefer_max_devices=prefer_max_devices,
            exclusive=exclusive,
        )
        return cast(PlacementGroup, self._ask(request))

    def cuda(self, memory_gb: int | float, *, exclusive: bool = False, device_id: int | None = None) -> Placement:
        """`reserve` with Device.GPU and Backend.CUDA."""
        return self.reserve(
            device=Device.GPU, backend=Backend.CUDA, memory_gb=memory_gb, exclusive=exclusive, device_id=device_id
        )

    def cuda_group(
        self,
        *,
        group_memory_gb: int | float = 0,
        per_device_memory_gb: int | float = 0,
        max_devices: int,
        min_devices: int = 1,
        prefer_max_devices: bool = False,
        exclusive: bool = False,
    ) -> PlacementGroup:
        """`reserve_group` with Device.GPU and Backend.CUDA."""
        return self.reserve_group(
            device=Device.GPU,
            backend=Backend.CUDA,
            group_memory_gb=group_memory_gb,
            per_device_memory_gb=per_device_memory_gb,
            max_devices=max_devices,
            min_devices=min_devices,
            prefer_max_devices=prefer_max_devices,
            exclusive=exclusive,
        )

    @property
    def placement_requests(self) -> tuple[Request, ...]:
        """The requests that this invocation has issued, in order."""
        return tuple(self._invocation.issued)

    def _ask(self, request: Request) -> PlacementLocation:
        invocation = self._invocation
        name = invocation.work.execution.name
        if os.getpid() != self._pid:
            raise PlacementUnavailableHere(
                f"{name}: a forked child owns nothing of its parent; use a new Runtime in the child"
            )
        if invocation.ended:
            raise PlacementUnavailableHere(f"{name}: self.placement was used after its invocation had ended")
        if not invocation.busy.acquire(blocking=False):
            raise ConcurrentRequests(
                f"{name}: two threads asked for a placement at once; requests of one invocation need one order"
            )
        try:
            self._refuse_other_task(name)
            if invocation.signalled:
                raise PlacementSignalSwallowed(SWALLOWED.format(name=name))
            return self._answer(invocation, request)
        finally:
            invocation.busy.release()

    def _refuse_other_task(self, name: str) -> None:
        """Two asyncio tasks that both still run have no order between their requests; `execute`'s own task has."""
        task = _current_task()
        last, main = self._invocation.last_task, self._invocation.main_task
        if last is not None and last is not task and main not in (last, task) and not last.done():
            raise ConcurrentRequests(
                f"{name}: two asyncio tasks asked for placements at once; requests of one invocation need one order"
            )
        self._invocation.last_task = task


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
