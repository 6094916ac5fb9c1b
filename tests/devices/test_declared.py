"""Device files: what they may say, and where each mistake is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from jayrun.devices.declared import load_devices
from jayrun.domain.devices import Backend, Device, RuntimeDevice
from jayrun.errors import DeviceFileError

GOOD = """\
# two cards
[[device]]
device = "gpu"
backends = ["cuda", "opencl"]
device_id = 0
memory_limit_gb = 24

[[ "device" ]]  # the other one
"device" = 'gpu'
backends = [
    "cuda",
]
device_id = 1
memory_limit_gb = 79.5
exclusive_only = true
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "devices.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_file_is_a_list_of_devices(tmp_path: Path) -> None:
    assert load_devices(write(tmp_path, GOOD)) == [
        RuntimeDevice(Device.GPU, [Backend.CUDA, Backend.OPENCL], 0, 24),
        RuntimeDevice(Device.GPU, [Backend.CUDA], 1, 79.5, exclusive_only=True),
    ]


def test_line_ends_and_inline_tables_are_as_good(tmp_path: Path) -> None:
    assert len(load_devices(write(tmp_path, GOOD.replace("\n", "\r\n")))) == 2
    inline = 'device = [{device = "tpu", backends = ["xla"], device_id = 0, memory_limit_gb = 16}]\n'
    assert load_devices(write(tmp_path, inline)) == [RuntimeDevice(Device.TPU, [Backend.XLA], 0, 16)]


def test_equal_numbers_of_different_kinds_are_different_devices(tmp_path: Path) -> None:
    tpu = '[[device]]\ndevice = "tpu"\nbackends = ["xla"]\ndevice_id = 0\nmemory_limit_gb = 16\n'
    assert len(load_devices(write(tmp_path, GOOD + tpu))) == 3


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        # keys
        ("device_id = 0", "device-id = 0", 5, ["'device-id'", "allowed are", "device_id", "exclusive_only"]),
        ("device_id = 1", "device_id = 1\nname = 'x'", 14, ["'name'", "allowed are"]),
        ("device_id = 1\n", "", 8, ["lacks", "'device_id'"]),
        ('backends = ["cuda", "opencl"]\n', "", 2, ["lacks", "'backends'"]),
        ("# two cards", "version = 1", 1, ["'version'", "[[device]]"]),
        ("# two cards", "\n[gpu]\ndevice = 1\n", 2, ["'gpu'", "[[device]]"]),
        ("[[device]]\n", "[[devices]]\n", 2, ["'devices'", "[[device]]"]),
        # values
        ('device = "gpu"', 'device = "GPU"', 3, ["device must be one of", '"gpu", "tpu"', "'GPU'"]),
        ('device = "gpu"', "device = 1", 3, ["device must be one of", "not 1"]),
        ('device = "gpu"', 'device = "cpu"', 3, ["device", "CPU needs no reservation"]),
        ('["cuda", "opencl"]', "[]", 4, ["backends", "one or more", '"cuda"', "[]"]),
        ('["cuda", "opencl"]', '"cuda"', 4, ["backends", "list", "'cuda'"]),
        ('["cuda", "opencl"]', '["cuda", "vulkan"]', 4, ["backends", '"rocm"', "'vulkan'"]),
        ('["cuda", "opencl"]', '[["cuda"]]', 4, ["backends", '"rocm"']),
        ("device_id = 1", "device_id = -1", 13, ["device_id", "at least 0", "-1"]),
        ("device_id = 1", "device_id = 1.0", 13, ["device_id", "whole number", "1.0"]),
        ("device_id = 1", "device_id = true", 13, ["device_id", "whole number", "True"]),
        ("device_id = 1", "device_id = 99999999999", 13, ["device_id", "at most"]),
        ("memory_limit_gb = 24", "memory_limit_gb = '24'", 6, ["memory_limit_gb", "a number", "'24'"]),
        ("memory_limit_gb = 24", "memory_limit_gb = 0", 6, ["memory_limit_gb", "positive"]),
        ("memory_limit_gb = 24", "memory_limit_gb = -1", 6, ["memory_limit_gb", "negative"]),
        ("memory_limit_gb = 24", "memory_limit_gb = inf", 6, ["memory_limit_gb", "finite"]),
        ("memory_limit_gb = 24", "memory_limit_gb = 1e30", 6, ["memory_limit_gb", "at most"]),
        ("memory_limit_gb = 24", "memory_limit_gb.x = 24", 6, ["memory_limit_gb", "a number"]),
        ("exclusive_only = true", "exclusive_only = 1", 15, ["exclusive_only", "True or False"]),
        ("device_id = 1", "device_id = 0", 13, ["device_id 0", "gpu", "twice", "line 5"]),
        # no TOML
        ('device = "gpu"', "device = gpu", 3, ["not TOML"]),
        ("device_id = 0", "device_id = 0\ndevice_id = 0", 6, ["not TOML", "overwrite"]),
        ("exclusive_only = true", 'exclusive_only = "', 15, ["not TOML"]),
        ("memory_limit_gb = 24", "memory_limit_gb = " + "9" * 5000, None, ["not TOML"]),
        ("[[device]]\n", "[device]\n", None, ["not TOML"]),
    ],
)
def test_every_mistake_has_a_place(tmp_path: Path, old: str, new: str, line: int | None, words: list[str]) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(DeviceFileError) as raised:
        load_devices(path)
    message = str(raised.value)
    assert message.startswith(f"{path}, line {line or ''}")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["declares nothing", "[[device]]"]),
        ("# nothing yet\n", ["declares nothing"]),
        ("device = []\n", ["line 1", "declares nothing"]),
        ('[device]\ndevice = "gpu"\n', ["line 1", "[[device]]"]),
        ('device = "gpu"\n', ["line 1", "[[device]]"]),
        ('device = [{device = "gpu"}]\n', ["lacks", "'backends'"]),
        (b"[[device]]\ndevice = '\xff'\n", ["line 2", "UTF-8"]),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str | bytes, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(DeviceFileError) as raised:
        load_devices(path)
    for word in [str(path), *words]:
        assert word in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DeviceFileError, match=r"absent\.toml: cannot be read: No such file"):
        load_devices(tmp_path / "absent.toml")
    with pytest.raises(DeviceFileError, match="cannot be read: Is a directory"):
        load_devices(tmp_path)
