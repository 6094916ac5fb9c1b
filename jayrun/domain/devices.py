"""What a device is: as declared by a person, as recorded in the book, and the share of it that a lease takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from jayrun.domain.checks import flag, member, whole_number
from jayrun.domain.units import gigabytes_to_bytes, plain_number


class Device(StrEnum):
    """The kind of a device."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


class Backend(StrEnum):
    """The software by which a device is used."""

    CUDA = "cuda"
    MPS = "mps"
    OPENCL = "opencl"
    ROCM = "rocm"
    XLA = "xla"
    XPU = "xpu"


class DeviceState(StrEnum):
    """Whether a device takes new leases: only an online one does; existing leases stay in every state."""

    ONLINE = "online"
    DRAINING = "draining"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class RuntimeDevice:
    """One accelerator that jayrun may lease, as it is declared.

    `device`: its kind, not CPU. `backends`: one or more, kept as a sorted tuple. `device_id`: its number on its host.
    `memory_limit_gb`: how many decimal gigabytes may be leased. `exclusive_only`: one lease at a time.

    Raises TypeError for a wrong type and ValueError for CPU, no backend, a negative id or memory that is not positive.
    """

    device: Device
    backends: Collection[Backend]
    device_id: int
    memory_limit_gb: int | float
    exclusive_only: bool = False

    def __post_init__(self) -> None:
        accelerator(self.device)
        object.__setattr__(self, "backends", _backends(self.backends))
        object.__setattr__(self, "device_id", whole_number(self.device_id, "device_id"))
        if gigabytes_to_bytes(self.memory_limit_gb, "memory_limit_gb") == 0:
            raise ValueError(f"memory_limit_gb must be positive, but is {self.memory_limit_gb!r}")
        object.__setattr__(self, "memory_limit_gb", plain_number(self.memory_limit_gb, "memory_limit_gb"))
        flag(self.exclusive_only, "exclusive_only")

    @property
    def memory_bytes(self) -> int:
        """The bytes that may be leased."""
        return gigabytes_to_bytes(self.memory_limit_gb, "memory_limit_gb")


@dataclass(frozen=True, slots=True)
class Share:
    """What one lease takes of one device, named by its key in the book and its number on its host."""

    device_id: int
    host_index: int
    memory_bytes: int
    exclusive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BookedDevice:
    """A device as the book shows it at one moment.

    `id` is its key in the book, `host_index` its number on its host. `share_count` counts live shares, also those of
    zero bytes; `exclusive` says that one of them is exclusive. `reserved_bytes` may exceed `capacity_bytes` when the
    capacity was lowered while leases lived.

    `withheld_bytes` are used by somebody without a lease, or not known to be free yet: nobody is granted them.
    `is_slice`: it is a MIG slice, which a process gets alone. Devices of one `island` are linked to each other most
    closely (None: no link is known). `fault` tells why the hardware does not serve it; such a device is offline.
    """

    id: int
    host_id: int
    host_index: int
    kind: Device
    backends: frozenset[Backend]
    capacity_bytes: int
    reserved_bytes: int = 0
    share_count: int = 0
    exclusive: bool = False
    exclusive_only: bool = False
    state: DeviceState = DeviceState.ONLINE
    withheld_bytes: int = 0
    is_slice: bool = False
    island: int | None = None
    fault: str | None = None

    @property
    def free_bytes(self) -> int:
        """Bytes neither reserved nor withheld; negative when that is more than there is."""
        return self.capacity_bytes - self.reserved_bytes - self.withheld_bytes

    def emptied(self) -> BookedDevice:
        """The same device without any lease; what is withheld stays so, for the end of no lease brings it back."""
        return self._carrying(0, 0, False, self.state, self.withheld_bytes)

    def as_declared(self) -> BookedDevice:
        """The same device without any lease, online and with nothing withheld, as it could be one day."""
        return self._carrying(0, 0, False, DeviceState.ONLINE, 0)

    def with_share(self, share: Share) -> BookedDevice:
        """The same device with `share` booked in addition, whether or not it fits."""
        return self._carrying(
            self.reserved_bytes + share.memory_bytes,
            self.share_count + 1,
            self.exclusive or share.exclusive,
            self.state,
            self.withheld_bytes,
        )

    def without_shares(self, shares: Iterable[Share]) -> BookedDevice:
        """The same device after those of `shares` that lie on it have ended; an exclusive share was the only one."""
        mine = [share for share in shares if share.device_id == self.id]
        return self._carrying(
            self.reserved_bytes - sum(share.memory_bytes for share in mine),
            self.share_count - len(mine),
            self.exclusive and not any(share.exclusive for share in mine),
            self.state,
            self.withheld_bytes,
        )

    def _carrying(
        self, reserved_bytes: int, share_count: int, exclusive: bool, state: DeviceState, withheld_bytes: int
    ) -> BookedDevice:
        # Written out, for it runs in the innermost loops, where `dataclasses.replace` takes three times as long.
        return BookedDevice(
            id=self.id,
            host_id=self.host_id,
            host_index=self.host_index,
            kind=self.kind,
            backends=self.backends,
            capacity_bytes=self.capacity_bytes,
            reserved_bytes=reserved_bytes,
            share_count=share_count,
            exclusive=exclusive,
            exclusive_only=self.exclusive_only,
            state=state,
            withheld_bytes=withheld_bytes,
            is_slice=self.is_slice,
            island=self.island,
            fault=self.fault,
        )


def accelerator(value: object) -> Device:
    """`value` when it is a kind of device that can be reserved; raises TypeError, or ValueError for CPU."""
    device = member(value, "device", Device)
    if device is Device.CPU:
        raise ValueError("device must be an accelerator, but is Device.CPU: the CPU needs no reservation")
    return device


def _backends(value: object) -> tuple[Backend, ...]:
    # A single Backend is a str and so iterable: without this its letters would be refused instead of itself.
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"backends must be a collection of Backend, not {value!r} ({type(value).__name__})")
    backends = {member(each, "backends", Backend) for each in value}
    if not backends:
        raise ValueError("backends must name at least one Backend, but is empty")
    return tuple(sorted(backends))
