"""One rollout as a single HTML file, for a colleague who has neither the run nor this package: nothing is fetched.

The file has the page's own style and scripts, the answers that its views would ask the server for, and the images. A
browser loads modules from files only, so they are joined to one script: each stands at its top level, and no two use
the same name.
"""

import re
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from html import escape

import orjson

from areal_agent.errors import LedgerError
from areal_agent.images import content_type
from areal_agent.types import JsonObject
from areal_agent.view.trajectory import RecordedRollout

MODULES = ("parts.js", "trajectory.js", "tokens.js", "export.js")
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_FORM = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
{style}</style>
<p id="notice" role="status" hidden></p>
<main id="main" tabindex="-1"></main>
<script>globalThis.EXPORTED = {answers};</script>
<script type="module">
{script}</script>
</html>
"""


def export(rollout: RecordedRollout, page: Mapping[str, bytes]) -> str:
    """Return the file of a rollout, made of the page's files by name. Its siblings stay at home."""
    answers: dict[str, JsonObject] = {"": {**rollout.describe(), "siblings": [], "images": _images(rollout)}}  # by turn
    answers |= {turn.id: rollout.tokens(turn.id) for turn in rollout.turns}
    modules = (_EXPORT.sub("", _IMPORT.sub("", page[name].decode())) for name in MODULES)
    return _FORM.format(
        title=escape(rollout.one.session_id),
        style=page["style.css"].decode(),
        answers=orjson.dumps(answers).decode().replace("<", "\\u003c"),  # no text of a stranger ends the script
        script="".join(modules),
    )


def _images(rollout: RecordedRollout) -> Mapping[str, str]:
    """Return the images of a rollout as data URLs, by digest; those that cannot be read have none."""
    found: dict[str, str] = {}
    for digest in {one.digest for turn in rollout.turns for one in turn.images}:
        with suppress(LedgerError):
            data = rollout.images.read(digest)
            if (kind := content_type(data)) is not None:
                found[digest] = f"data:{kind};base64,{b64encode(data).decode()}"
    return found
