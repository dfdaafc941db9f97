"""How containers are closed, read from the configuration that the engine is given.

1. no network, no capabilities but the agent's three, no new privileges, a read-only root; 2. memory without swap,
processes, CPUs and disks as the limits say, the disks together no more than allowed; 3. nothing of a spec reaches the
configuration but by its own field; 4. root and names are refused as users; 5. folders that cannot be a disk of their
own are refused; 6. a runtime that is not installed is refused, and one
that is a kernel of its own has room for itself; 7. the network is a tunnel; 8. users
differ from container to container; 9. only where an image can be written to may programs be root, with three
capabilities.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.errors import SandboxError
from sandboxes.cgroups import AGENT_BYTES
from sandboxes.containers.confinement import (
    AGENT_PIDS,
    SANDBOXED_BYTES,
    SANDBOXED_PIDS,
    check,
    container_config,
    user_of,
    workdir_of,
)
from sandboxes.spec import CellSpec, Limits, Network

RUNTIMES = frozenset({"runc"})
DANGEROUS = (
    "Privileged", "Binds", "Mounts", "Devices", "DeviceRequests", "VolumesFrom", "PidMode", "UTSMode", "UsernsMode",
    "ExtraHosts", "PublishAllPorts", "PortBindings", "MaskedPaths", "ReadonlyPaths", "GroupAdd", "Links",
)  # fmt: skip


def config_of(spec: CellSpec) -> dict[str, Any]:
    return container_config(spec, user_of(spec), image="sha256:0", command=["agent"], labels={"a": "b"})


def sizes(tmpfs: dict[str, str], option: str) -> int:
    return sum(int(re.search(rf"\b{option}=(\d+)", options)[1]) for options in tmpfs.values())


def test_closed() -> None:
    config = config_of(CellSpec(limits=Limits()))
    host = config["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], ["SETUID", "SETGID", "KILL"])
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["ReadonlyRootfs"] is True


def test_limits() -> None:
    limits = Limits(memory_bytes=2**27, pids=7, cpus=0.5, disk_bytes=2**24, inodes=1600)
    host = config_of(CellSpec(limits=limits))["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 2**27 + 2**24 + AGENT_BYTES  # full disks count as memory
    assert (host["PidsLimit"], host["CpuQuota"]) == (7 + AGENT_PIDS, 50_000)
    assert (sizes(host["Tmpfs"], "size"), sizes(host["Tmpfs"], "nr_inodes")) == (2**24, 1600)
    assert all("nosuid,nodev" in options for options in host["Tmpfs"].values())


words = st.text(max_size=30) | st.sampled_from(["--privileged", "/x:/y", "/var/run", "host", "0", "root", "1000:0"])


@given(user=st.none() | words, workdir=st.none() | words, runtime=st.none() | words)
def test_a_spec_asks_for_its_own_fields_alone(user: str | None, workdir: str | None, runtime: str | None) -> None:
    spec = CellSpec(limits=Limits(), user=user, workdir=workdir, runtime=runtime)
    plain = config_of(CellSpec(limits=Limits()))
    try:
        check(spec, RUNTIMES)
    except SandboxError:
        return
    config = config_of(spec)
    host = config["HostConfig"]
    assert set(config) == set(plain)
    assert not set(host) & set(DANGEROUS)
    assert {name for name in host if host[name] != plain["HostConfig"][name]} <= {"Tmpfs", "Runtime"}
    assert host["Runtime"] in ("", *RUNTIMES)
    assert all(path.startswith("/") for path in host["Tmpfs"])


@pytest.mark.parametrize("user", ["root", "0", "0:0", "1000:0", "nobody", "-1", "1 ", "", "1:2:3"])
def test_user_that_is_refused(user: str) -> None:
    with pytest.raises(SandboxError, match="user"):
        user_of(CellSpec(limits=Limits(), user=user))


def test_user() -> None:
    user = user_of(CellSpec(limits=Limits(), user="1000:1001"))
    assert (user.uid, user.gid) == (1000, 1001)


@pytest.mark.parametrize(
    "workdir", ["/", "work", "/proc/1", "/sys/x", "/dev/shm", "/usr", "/a/../etc", "", "/tmp", "//x"]
)
def test_workdir_that_is_refused(workdir: str) -> None:
    with pytest.raises(SandboxError, match="workdir"):
        workdir_of(CellSpec(limits=Limits(), workdir=workdir))


def test_runtime_that_is_not_installed() -> None:
    with pytest.raises(SandboxError, match=r"runsc.*runc"):
        check(CellSpec(limits=Limits(), runtime="runsc"), RUNTIMES)


def test_room_of_a_runtime_that_is_a_kernel_of_its_own() -> None:
    plain, sandboxed = (config_of(CellSpec(limits=Limits(), runtime=name))["HostConfig"] for name in ("runc", "runsc"))
    assert sandboxed["Memory"] == sandboxed["MemorySwap"] == plain["Memory"] + SANDBOXED_BYTES
    assert sandboxed["PidsLimit"] == plain["PidsLimit"] + SANDBOXED_PIDS


def test_network_is_a_tunnel_and_no_interface() -> None:
    spec = CellSpec(limits=Limits(pids=7), network=Network.full())
    check(spec, RUNTIMES)
    host = config_of(spec)["HostConfig"]
    assert (host["NetworkMode"], host["PidsLimit"]) == ("none", 7 + AGENT_PIDS)


def test_every_container_has_a_user_of_its_own() -> None:
    assert len({user_of(CellSpec(limits=Limits())) for _ in range(20)}) == 20


def test_image_that_can_be_written_to() -> None:
    spec = CellSpec(limits=Limits(), user="0", workdir="/", is_writable=True)
    check(spec, RUNTIMES)
    host = config_of(spec)["HostConfig"]
    assert host["CapAdd"] == ["SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER"]
    assert (host["ReadonlyRootfs"], list(host["Tmpfs"]), host["SecurityOpt"]) == (
        False,
        ["/dev/shm"],
        ["no-new-privileges"],
    )
    with pytest.raises(SandboxError, match="is_writable=True"):
        user_of(replace(spec, is_writable=False))
    with pytest.raises(SandboxError, match="user is '0:5'"):
        user_of(replace(spec, user="0:5"))
