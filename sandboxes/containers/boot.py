"""How the agent gets into a container: a command line that reads modules from its standard input, and these modules.

So an image needs a python3 and nothing of ours, and a container always has the agent of its host.
"""

from pathlib import Path

PACKAGE = Path(__file__).parent.parent
MODULES = (
    "inner.kernel",
    "inner.program",
    "containers.agent.wire",
    "containers.agent.files",
    "containers.agent.program",
    "containers.agent.forker",
    "containers.agent.counters",
    "containers.agent.relay",
    "containers.agent.main",
)
"""In the order of their imports. The first two fail where Python has no `ctypes`, and are done without."""
PACKAGES = ("", "inner", "containers", "containers.agent")
READER = """
import os, sys, types
def take(size):
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more: os._exit(0)
        data += more
    return data
*texts, configuration = take(int.from_bytes(take(4), "big")).split(b"\\0")
for name, source in zip(texts[::2], texts[1::2]):
    name = name.decode()
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__, module.__file__ = [], name
    try: exec(compile(source, name, "exec"), module.__dict__)
    except ImportError: del sys.modules[name]
sys.modules["sandboxes.containers.agent.main"].main(bytes.fromhex(configuration.decode()))
"""
COMMAND = ("python3", "-I", "-S", "-X", "utf8", "-c", READER)


def boot_data(system_call_filter: bytes) -> bytes:
    """What `COMMAND` reads first."""
    texts: list[bytes] = []
    for package in PACKAGES:
        texts += [f"sandboxes.{package}".rstrip(".").encode(), b""]
    for module in MODULES:
        path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
        texts += [f"sandboxes.{module}".encode(), path.read_bytes()]
    data = b"\0".join([*texts, system_call_filter.hex().encode()])
    return len(data).to_bytes(4, "big") + data
