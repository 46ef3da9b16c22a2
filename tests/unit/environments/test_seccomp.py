"""The filter, run by an interpreter of the few instructions that it has."""

import errno
import struct

import pytest

from p2prl.environments.seccomp import filter_program
from p2prl.errors import ConfigError

ALLOWED, REFUSED = 0x7FFF0000, 0x00050000 | errno.EPERM
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {
    "x86_64": {"read": 0, "write": 1, "mmap": 9, "execve": 59, "exit_group": 231, "getrandom": 318},
    "aarch64": {"read": 63, "write": 64, "mmap": 222, "execve": 221, "exit_group": 94, "getrandom": 278},
}
FORBIDDEN = {
    "x86_64": {
        "socket": 41,
        "clone": 56,
        "fork": 57,
        "mount": 165,
        "unshare": 272,
        "io_uring_setup": 425,
        "clone3": 435,
        "shmget": 29,
        "msgget": 68,
        "semget": 64,
        "socketpair": 53,
    },
    "aarch64": {
        "shmget": 194,
        "msgget": 186,
        "semget": 190,
        "socketpair": 199,
        "socket": 198,
        "clone": 220,
        "mount": 40,
        "unshare": 97,
        "io_uring_setup": 425,
        "clone3": 435,
    },
}


def verdict(program: bytes, number: int, architecture: int) -> int:
    place, loaded = 0, 0
    data = struct.pack("=II", number, architecture)
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * place)
        place += 1
        match code:
            case 0x20:
                (loaded,) = struct.unpack_from("=I", data, value)
            case 0x15:
                place += if_true if loaded == value else if_false
            case 0x35:
                place += if_true if loaded >= value else if_false
            case 0x06:
                return value
            case _:
                raise AssertionError(code)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_computing_needs_is_allowed_and_the_rest_refused(machine: str) -> None:
    program = filter_program(machine)
    for name, number in NUMBERS[machine].items():
        assert verdict(program, number, AUDIT[machine]) == ALLOWED, name
    for name, number in FORBIDDEN[machine].items():
        assert verdict(program, number, AUDIT[machine]) == REFUSED, name
    assert verdict(program, 0x40000000 | 1, AUDIT[machine]) == REFUSED  # x32
    assert verdict(program, 4, 0x40000003) == REFUSED  # 32-bit calls have other numbers


def test_another_processor_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="doesn't know riscv64"):
        filter_program("riscv64")
