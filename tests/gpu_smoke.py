"""For a machine with an NVIDIA GPU: what jayrun says of it, against nvidia-smi and PyTorch (which is optional).

    python tests/gpu_smoke.py

It makes a book of its own in a folder that it removes again, prints a line for each check, and ends with 1 when one
failed. What cannot be checked here is told as skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

MIB = 2**20
TENSOR_BYTES = 512 * MIB
_QUERY = "index,uuid,name,memory.total,pci.bus_id,mig.mode.current"
_HOLD = f"""
import json, os, sys
from jayrun import Data, Operator, Runtime

class Hold(Operator):
    def execute(self) -> Data:
        placement = self.placement.cuda(2)
        import torch
        tensor = torch.ones({TENSOR_BYTES}, dtype=torch.uint8, device=f"cuda:{{placement.device_id}}")
        torch.cuda.synchronize(placement.device_id)
        uuid = getattr(torch.cuda.get_device_properties(placement.device_id), "uuid", None)
        print(json.dumps([os.getpid(), placement.device_uuid, None if uuid is None else str(uuid)]), flush=True)
        return Data(tensor, placement)

runtime = Runtime(label="gpu-smoke")
held = runtime.run(Hold)
sys.stdin.readline()
del held
runtime.close()
print("released", flush=True)
sys.stdin.readline()
"""


class Skipped(Exception):
    """Why a check cannot be made here."""


def jayrun(*arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """What the command prints."""
    command = [sys.executable, "-c", "from jayrun.cli.app import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode in codes, f"jayrun {' '.join(arguments)} ended with {done.returncode}: {done.stderr}"
    return done.stdout


def cards() -> list[dict[str, str]]:
    """What nvidia-smi says, in PCI order."""
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"nvidia-smi ended with {done.returncode}: {done.stdout}{done.stderr}"
    rows = [dict(zip(_QUERY.split(","), line.split(", "), strict=True)) for line in done.stdout.splitlines() if line]
    return sorted(rows, key=lambda row: row["pci.bus_id"].lower())


def whole() -> list[dict[str, Any]]:
    return [row for row in json.loads(jayrun("devices", "list", "--json")) if row["parent_uuid"] is None]


def there_is_a_driver() -> str:
    if shutil.which("nvidia-smi") is None:
        raise Skipped("there is no nvidia-smi here")
    return f"{len(cards())} GPU(s)"


def discovery_finds_what_nvidia_smi_shows() -> str:
    jayrun("devices", "discover")
    shown, booked = cards(), whole()
    assert [row["device_id"] for row in booked] == list(range(len(shown))), "numbers are not 0, 1, ..."
    for card, row in zip(shown, booked, strict=True):
        for mine, theirs in (("device_uuid", "uuid"), ("name", "name")):
            assert row[mine] == card[theirs], f"{row[mine]} is not {card[theirs]}"
        assert row["pci_bus_id"].lower() == card["pci.bus_id"].lower(), f"{row['pci_bus_id']} is not its place"
        total = int(card["memory.total"]) * MIB
        assert abs(row["total_bytes"] - total) < MIB, f"{row['total_bytes']} bytes in all, and not {total}"
        assert 0 < row["capacity_bytes"] <= row["total_bytes"], f"capacity {row['capacity_bytes']}"
        state = "offline" if card["mig.mode.current"] == "Enabled" else "online"
        assert row["state"] == state, f"gpu {row['device_id']} is {row['state']}: {row['fault']}"
    return ", ".join(f"gpu {row['device_id']} {row['name']}" for row in booked)


def discovering_again_changes_nothing() -> str:
    found = json.loads(jayrun("devices", "discover", "--json"))
    assert found["changes"] == [], found["changes"]
    return "no change"


def a_command_is_told_its_gpu() -> str:
    online = [row for row in json.loads(jayrun("devices", "list", "--json")) if row["state"] == "online"]
    if not online:
        raise Skipped("no GPU is online")
    script = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['CUDA_DEVICE_ORDER'])"
    told = jayrun("run", "--gpus", "1", "--memory-gb", "1", "--", sys.executable, "-c", script).split()
    assert told[0] in {row["device_uuid"] for row in online}, f"CUDA_VISIBLE_DEVICES={told[0]}"
    assert told[1] == "PCI_BUS_ID", f"CUDA_DEVICE_ORDER={told[1]}"
    return told[0]


def a_tensor_lies_on_the_leased_card_and_goes_with_the_lease() -> str:
    try:
        import torch
    except ImportError:
        raise Skipped("PyTorch is not installed") from None
    if not torch.cuda.is_available():
        raise Skipped("PyTorch finds no GPU")
    holder = subprocess.Popen([sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        line = holder.stdout.readline()
        assert line, f"the holder ended with {holder.wait()}"
        pid, uuid, by_torch = json.loads(line)
        assert by_torch is None or by_torch.removeprefix("GPU-") in uuid or uuid.startswith("MIG-"), (
            f"the tensor is on {by_torch}, the lease on {uuid}"
        )
        found = audited(uuid)
        if not any(row["finding"] != "unreadable" for row in found):
            raise Skipped(f"processes cannot be seen from here: {found[0]['detail']}")
        mine = [row for row in found if row["lease_id"] is not None]
        assert len(mine) == 1, f"the audit has {len(mine)} leases on {uuid}"
        used = mine[0]["used_bytes"]
        assert used is None or used >= TENSOR_BYTES, f"the audit sees {used} bytes of {TENSOR_BYTES}, pid {pid}"
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "released\n", "the lease was not released"
        assert all(row["lease_id"] is None for row in audited(uuid)), "the lease is still there"
    finally:
        holder.kill()
        holder.wait()
    give_up_at = time.monotonic() + 30
    while any(row["pid"] == pid for row in audited(uuid)):
        assert time.monotonic() < give_up_at, f"the driver still shows pid {pid} after 30 s"
        time.sleep(0.5)
    [row] = [row for row in json.loads(jayrun("devices", "list", "--json")) if row["device_uuid"] == uuid]
    assert (row["leases"], row["free_bytes"]) == (0, row["capacity_bytes"]), "the device is not free again"
    seen = "an unknown amount" if used is None else f"{used / MIB:.0f} MiB"
    return f"{uuid}: the audit saw {seen} of pid {pid}" + ("" if by_torch else "; PyTorch tells no UUID")


def audited(uuid: str) -> list[dict[str, Any]]:
    """The rows of the audit for a device."""
    numbers = {
        row["device_id"] for row in json.loads(jayrun("devices", "list", "--json")) if row["device_uuid"] == uuid
    }
    rows = json.loads(jayrun("audit", "--json", codes=(0, 1)))
    return [row for row in rows if row["device"] == "gpu" and row["device_id"] in numbers]


def nothing_is_left() -> str:
    leases = json.loads(jayrun("leases", "list", "--json"))
    assert leases == [], f"{len(leases)} leases are left"
    return "no lease"


CHECKS: tuple[Callable[[], str], ...] = (
    there_is_a_driver,
    discovery_finds_what_nvidia_smi_shows,
    discovering_again_changes_nothing,
    a_command_is_told_its_gpu,
    a_tensor_lies_on_the_leased_card_and_goes_with_the_lease,
    nothing_is_left,
)


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="jayrun-gpu-smoke-") as folder:
        os.chmod(folder, 0o711)  # root's server runs as another user, who must get in
        for name in [name for name in os.environ if name.startswith("JAYRUN_") and not name.startswith("JAYRUN_TEST")]:
            if name != "JAYRUN_PG_BINDIR":
                del os.environ[name]
        os.environ["JAYRUN_HOME"] = os.path.join(folder, "book")
        try:
            for check in CHECKS:
                words = check.__name__.replace("_", " ")
                try:
                    print(f"ok       {words}: {check()}", flush=True)
                except Skipped as why:
                    print(f"skipped  {words}: {why}", flush=True)
                    if check is there_is_a_driver:
                        break
                except Exception as error:
                    failed += 1
                    print(f"FAILED   {words}: {error or type(error).__name__}", flush=True)
        finally:
            subprocess.run(
                [sys.executable, "-c", "from jayrun.cli.app import main; main()", "db", "down"], capture_output=True
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
