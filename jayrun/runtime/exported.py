"""What tells a wrapped command, or a container that it starts, which devices are its own: environment variables."""

from __future__ import annotations

from collections.abc import Sequence

from jayrun.descendants import LEASE_VARIABLE
from jayrun.devices.visible import Mask, Numbering
from jayrun.domain.devices import Backend, Device
from jayrun.settings import ORDER_VARIABLE, PCI_ORDER
from jayrun.store.leases import Lease, LeasedShare

DOCKER_VARIABLE = "JAYRUN_DOCKER_FLAGS"
"""Options for `docker run`, meant to be split into words by a shell: `docker run $JAYRUN_DOCKER_FLAGS image`."""


def environment(device: Device, backend: Backend, lease: Lease, numbering: Numbering, mask: Mask) -> dict[str, str]:
    """The variables for a command that uses the devices of `lease` by `backend`.

    By UUIDs, which mean the same in every order and container, unless numbers are wanted or not all UUIDs are known. A
    MIG slice is always named by its UUID, for it has no other name; Level Zero knows numbers only.
    """
    shares = lease.shares
    uuids = [share.device_uuid for share in shares if share.device_uuid is not None]
    numbers = [str(numbering.index(device, backend, share.host_index, share.device_uuid)) for share in shares]
    are_slices = bool(uuids) and all(uuid.startswith("MIG-") for uuid in uuids)
    by_uuid = len(uuids) == len(shares) and (mask is Mask.UUID or are_slices)
    names = ",".join(uuids if by_uuid else numbers)
    variables = {LEASE_VARIABLE: str(lease.id)}
    match backend:
        case Backend.CUDA:
            variables |= {"CUDA_VISIBLE_DEVICES": names, ORDER_VARIABLE: PCI_ORDER}
        case Backend.ROCM:
            # HIP counts within what ROCR shows; an inherited mask would count there too, but for other devices.
            within = ",".join(str(ordinal) for ordinal in range(len(shares)))
            variables |= {"ROCR_VISIBLE_DEVICES": names, "HIP_VISIBLE_DEVICES": within}
        case Backend.XPU:
            variables["ZE_AFFINITY_MASK"] = ",".join(sorted(numbers, key=int))
        case _:
            pass  # there is no variable that its software heeds
    return variables


def docker_flags(backend: Backend, shares: Sequence[LeasedShare], variables: dict[str, str]) -> str:
    """Options for `docker run` that show a container the devices of these shares, given the command's `variables`.

    A shell that splits it into words takes away no quotes; so those around the list of several GPUs reach docker, which
    needs them.
    """
    passed = [f"-e {name}={value}" for name, value in variables.items() if name != "CUDA_VISIBLE_DEVICES"]
    match backend:
        case Backend.CUDA:
            gpus = "device=" + ",".join(share.device_uuid or str(share.host_index) for share in shares)
            shown = ["--gpus " + (f'"{gpus}"' if len(shares) > 1 else gpus)]
        case Backend.ROCM:
            shown = ["--device /dev/kfd", "--device /dev/dri"]
        case Backend.XPU:
            shown = ["--device /dev/dri"]
        case _:
            shown = []
    return " ".join(shown + passed)
