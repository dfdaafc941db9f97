"""The site of one task: its pages, and what was sent to it.

It is on no network: the browser's requests are answered in this process (chromium.py). A page is a form or leads to
one, and the first form that is sent is the answer.
"""

from collections.abc import Mapping
from html import escape
from typing import Any
from urllib.parse import parse_qs, quote, unquote

ORIGIN = "http://site.test"
FRAME = """<!DOCTYPE html><meta charset=utf-8><title>Site</title><style>
* { font: 18px/1.4 DejaVu Sans }
body { margin: %dpx %dpx; background: white; color: black }
label, li { display: block; margin: 10px 0 }
.tile { width: 60px; height: 60px; margin: 4px; border: 2px solid gray; border-radius: 8px }
text { font-size: 40px; letter-spacing: 6px }
</style><script> // A page that is about to be left says so, that nobody may look at it any more.
var isLeft = false
addEventListener("submit", () => isLeft = true)
addEventListener("click", (event) => { if (event.target.closest("a")) isLeft = true })
</script>"""


class Site:
    """The pages of `task`. `sent` is the first form that was sent: values by the names of its fields."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._task = task
        self.sent: dict[str, list[str]] | None = None

    @property
    def is_right(self) -> bool:
        return self.sent == self._task["right"]

    def answer(self, method: str, path: str, query: str, body: str) -> str | None:
        """Return the page that a request gets; None if there is no such page."""
        if method == "POST" and self.sent is None:
            self.sent = parse_qs(body, keep_blank_values=True)
        text = "<p>Thank you." if self.sent is not None else page_of(self._task, unquote(path)[1:], parse_qs(query))
        return None if text is None else FRAME % tuple(self._task["margin"]) + text


def page_of(task: Mapping[str, Any], path: str, query: Mapping[str, list[str]]) -> str | None:
    """Return the body of a page as HTML. Only a search has more than one: its results, and each of the goods."""
    match task["kind"]:
        case "button":
            tile = "<button class=tile name=colour value={0} style='background:{0}'></button>"
            return form("".join(map(tile.format, task["colours"])))
        case "form":
            turned = f"<text x=30 y=60 transform='rotate({task['tilt']} 100 45)'>{task['code']}</text>"
            return form(f"<svg width=200 height=90>{turned}</svg><p>Number: <input name=code size=8>", "Send")
        case "boxes":
            boxes = (f"<label><input type=checkbox name=fruit value={one}> {one}</label>" for one in task["fruit"])
            return form("".join(boxes), "Save")
        case _ if path in task["prices"]:
            fields = f"<input type=hidden name=name value='{path}'><p>{path}, {task['prices'][path]} dollars"
            return form(fields, "Order")
        case _ if path == "":
            asked = query.get("q", [""])[0].strip().lower()
            found = {name: price for name, price in task["prices"].items() if asked and asked in name}
            links = (f"<li><a href='/{quote(name)}'>{name}</a>, {price} dollars" for name, price in found.items())
            field = f"<form><input name=q size=14 value='{escape(asked)}'> <button>Search</button></form>"
            return field + ("".join(links) or "<p>Nothing was found." * bool(asked))
        case _:
            return None


def form(fields: str, button: str = "") -> str:
    return f"<form method=post autocomplete=off>{fields}{button and f'<p><button>{button}</button>'}</form>"
