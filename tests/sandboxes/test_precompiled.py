"""Texts that need hardly be compiled, in sandboxes.

1. They do what their source does, as `__main__`, also in a Python of another version, which compiles the source; 2. an
exception names their file; 3. a Python of this version does not look at the source.
"""

import pytest

from sandboxes import Sandbox
from sandboxes.judge.languages import precompiled

OTHER_VERSION = b"\0\0\r\n"


@pytest.mark.parametrize("options", [{}, {"version": OTHER_VERSION}], ids=["same", "other"])
async def test_it_does_what_its_source_does(box: Sandbox, options: dict[str, bytes]) -> None:
    text = precompiled('import sys\nprint(__name__, sys.stdin.read(), \'"""\\n{}\')\n1 / 0', "<mine>", **options)
    result = await box.exec_python(text, stdin=b"given")
    assert result.stdout == b'__main__ given """\n{}\n'
    assert b'File "<mine>", line 3' in result.stderr
    assert result.stderr.endswith(b"ZeroDivisionError: division by zero\n")


async def test_a_python_of_this_version_does_not_look_at_the_source(box: Sandbox) -> None:
    text = precompiled("print('as compiled')", "<mine>")
    assert (await box.exec_python(text.replace("print(", "1 / 0 (", 1))).stdout == b"as compiled\n"
