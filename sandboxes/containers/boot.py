"""How the agent gets into a container: a command line that reads modules from its standard input, and these modules.

So an image needs a python3 and nothing of ours, and a container always has the agent of its host. A Python of the
host's own version is spared the compilation, some 12 ms.
"""

import marshal
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from sandboxes.containers.agent.wire import pack

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
import marshal, os, sys, types
def take(size):
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more: os._exit(0)
        data += more
    return data
data, texts = take(int.from_bytes(take(4), "big")), []
while data:
    end = 4 + int.from_bytes(data[:4], "big")
    texts.append(data[4:end])
    data = data[end:]
configuration, version, *texts = texts
is_same = getattr(sys.modules.get("_frozen_importlib_external"), "MAGIC_NUMBER", b"") == version
for name, source, code in zip(texts[::3], texts[1::3], texts[2::3]):
    name = name.decode()
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__, module.__file__ = [], name
    try: exec(marshal.loads(code) if is_same else compile(source, name, "exec"), module.__dict__)
    except ImportError: del sys.modules[name]
sys.modules["sandboxes.containers.agent.main"].main(configuration)
"""
COMMAND = ("python3", "-I", "-S", "-X", "utf8", "-c", READER)


def boot_data(system_call_filter: bytes, version: bytes = MAGIC_NUMBER) -> bytes:
    """What `COMMAND` reads first. `version`: of the Python that may take what is compiled here."""
    texts = [system_call_filter, version]
    for package in PACKAGES:
        texts += module_texts(f"sandboxes.{package}".rstrip("."), b"")
    for module in MODULES:
        path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
        texts += module_texts(f"sandboxes.{module}", path.read_bytes())
    data = pack(*texts)
    return len(data).to_bytes(4, "big") + data


def module_texts(name: str, source: bytes) -> list[bytes]:
    """Its name, its source, and its code without docstrings."""
    code = compile(source, name, "exec", dont_inherit=True, optimize=2)
    return [name.encode(), source, marshal.dumps(code)]
