"""A system-call filter for the sandbox, as the kernel wants it.

In: this machine's architecture. Out: a BPF program for `bwrap --seccomp`. What it refuses with EPERM: new processes and
threads (limits on their number don't bind root), new namespaces, mounts, sockets, tracing, System V memory and queues
(they stay when they are detached, where no limit counts them), and calls of other architectures; a program that only
computes and prints needs none of these.
"""

import errno
import struct

from p2prl.errors import ConfigError

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {
    "x86_64": {
        "shmget": 29, "socket": 41, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "semget": 64, "msgget": 68,
        "ptrace": 101, "pivot_root": 155, "chroot": 161, "mount": 165, "umount2": 166, "add_key": 248,
        "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304,
        "setns": 308, "process_vm_readv": 310, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "unshare": 97, "ptrace": 117, "msgget": 186,
        "semget": 190, "shmget": 194, "socket": 198, "socketpair": 199, "add_key": 217, "request_key": 218,
        "keyctl": 219, "clone": 220, "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268,
        "process_vm_readv": 270, "bpf": 280, "userfaultfd": 282,
    },
}  # fmt: skip
_NEWER_FROM = 424  # the same numbers everywhere; all newer calls are refused, io_uring and clone3 among them
_X32_BIT = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # in struct seccomp_data


def filter_program(machine: str) -> bytes:
    """Raises ConfigError for an architecture that is not listed."""
    if machine not in _ARCHITECTURES:
        raise ConfigError(
            f"the sandbox doesn't know {machine} processors; it knows {', '.join(sorted(_ARCHITECTURES))}"
        )
    numbers = sorted(_REFUSED[machine].values())
    # A jump counts from the next instruction; the two returns stand at the end: allow, then refuse.
    tests = [(_EQUAL, number) for number in numbers] + [(_AT_LEAST, _NEWER_FROM)]
    program = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 0, len(tests) + 2, _ARCHITECTURES[machine])]
    program.append((_LOAD, 0, 0, _NUMBER_AT))
    program += [(code, len(tests) - place, 0, value) for place, (code, value) in enumerate(tests)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    assert _X32_BIT > _NEWER_FROM  # x86_64's other numbering is refused with the newer ones
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
