"""Python that is run again and again, as a text that hardly has to be compiled. It runs nothing.

A Python of this one's version takes the code as it is, any other compiles the source that comes with it.
"""

import marshal
from importlib.util import MAGIC_NUMBER

TEXT = """\
import marshal, sys
exec(
    marshal.loads({code!r})
    if getattr(sys.modules.get("_frozen_importlib_external"), "MAGIC_NUMBER", b"") == {version!r}
    else compile({source!r}, {name!r}, "exec", dont_inherit=True, optimize=2)
)
"""


def precompiled(source: str, name: str, version: bytes = MAGIC_NUMBER) -> str:
    """A text that does what `source` does.

    `name`: its file, in tracebacks; `version`: of the Python that takes the code.

    >>> exec(precompiled("print(6 * 7)", "<example>"))
    42
    """
    code = marshal.dumps(compile(source, name, "exec", dont_inherit=True, optimize=2))
    return TEXT.format(code=code, version=version, source=source, name=name)
