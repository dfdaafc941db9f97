"""The system-call filter, run by a small interpreter of its language that is written from the kernel's documentation.

1. What is listed is denied on every machine; 2. what programs need is allowed; 3. arguments decide for clone, ioctl and
socket; 4. another calling convention is killed or unknown; 5. any number and argument ends in a verdict (by property);
6. a machine without numbers is refused.
"""

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.errors import SandboxError
from sandboxes.seccomp import ARCHITECTURES, COMMON_NUMBERS, TESTED_BY_ARGUMENT, denying_filter

ALLOW, KILL = 0x7FFF_0000, 0x8000_0000


def verdict(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """What the filter returns for a call."""
    filled = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("=IIQ6Q", number, audit or ARCHITECTURES[machine].audit, 0, *filled)
    program = list(struct.iter_unpack("=HBBI", denying_filter(machine)))
    word, position = 0, 0
    while True:
        code, on_true, on_false, operand = program[position]
        position += 1
        if code == 0x20:
            [word] = struct.unpack_from("=I", data, operand)
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: word == operand, 0x35: word >= operand, 0x45: bool(word & operand)}[code]
            position += on_true if holds else on_false


def refused(number: int) -> int:
    return 0x0005_0000 | number


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_listed_calls_are_denied(machine: str) -> None:
    numbers = {**ARCHITECTURES[machine].numbers, **COMMON_NUMBERS}
    for name in numbers.keys() - set(TESTED_BY_ARGUMENT):
        assert verdict(machine, numbers[name]) == refused(errno.EPERM), name
    assert verdict(machine, 435) == refused(errno.ENOSYS)


def test_what_programs_need_is_allowed() -> None:
    for number in (0, 1, 2, 9, 57, 59, 60, 231, 257, 436):  # read, write, open, mmap, fork, execve, exits, openat, ...
        assert verdict("x86_64", number) == ALLOW


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_arguments_decide(machine: str) -> None:
    numbers = ARCHITECTURES[machine].numbers
    assert verdict(machine, numbers["clone"], 17) == ALLOW
    assert verdict(machine, numbers["clone"], 0x1000_0011) == refused(errno.EPERM)
    assert verdict(machine, numbers["ioctl"], 0, 0x5401) == ALLOW
    assert verdict(machine, numbers["ioctl"], 0, 0x5412) == refused(errno.EPERM)
    assert verdict(machine, numbers["ioctl"], 0, 0xFFFF_FFFF_0000_5412) == refused(
        errno.EPERM
    )  # the kernel takes 32 bits
    assert verdict(machine, numbers["socket"], 2) == ALLOW
    assert verdict(machine, numbers["socket"], 40) == refused(errno.EAFNOSUPPORT)


def test_other_calling_conventions() -> None:
    assert verdict("x86_64", 1, audit=0x4000_0003) == KILL
    assert verdict("x86_64", 0x4000_0001) == refused(errno.ENOSYS)


@given(machine=st.sampled_from(list(ARCHITECTURES)), number=st.integers(0, 2**32 - 1), first=st.integers(0, 2**64 - 1))
def test_every_call_gets_a_verdict(machine: str, number: int, first: int) -> None:
    assert verdict(machine, number, first) in {
        ALLOW, refused(errno.EPERM), refused(errno.ENOSYS), refused(errno.EAFNOSUPPORT)
    }  # fmt: skip


def test_unknown_machine_is_refused() -> None:
    with pytest.raises(SandboxError, match="no system-call filter for 'vax'"):
        denying_filter("vax")
