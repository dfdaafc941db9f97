"""The site of one task: its pages, as the browser asks for them, and what was sent to it.

Nothing of it is on a network: the browser's requests are answered in this process (chromium.py). A page is a form or
leads to one, and the first form that is sent is the answer.
"""

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

import matplotlib

ORIGIN = "http://site.test"
FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
"""The same letters on every machine."""

FRAME = """<!DOCTYPE html><meta charset=utf-8><title>Site</title><style>
@font-face { font-family: site; src: url(/font.ttf) }
* { font: 18px/1.4 site }
body { margin: %dpx %dpx; background: white; color: black }
label, li { display: block; margin: 10px 0 }
.tile { width: 60px; height: 60px; margin: 4px; border: 2px solid gray; border-radius: 8px }
</style><script>
// A page says that it is about to be left, so that nobody looks at it any more.
addEventListener("submit", () => isLeft = true)
addEventListener("click", (event) => { if (event.target.closest("a")) isLeft = true })
var isLeft = false
</script>"""


class Site:
    """The pages of `task`. `sent` is the first form that was sent, by the names of its fields."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._task = task
        self.sent: dict[str, list[str]] | None = None

    @property
    def is_right(self) -> bool:
        return self.sent == self._task["right"]

    def answer(self, method: str, path: str, query: str, body: str) -> tuple[str, bytes] | None:
        """Return the media type and the content of what a request gets; None if there is no such page."""
        if path == "/font.ttf":
            return "font/ttf", FONT.read_bytes()
        if method == "POST" and self.sent is None:
            self.sent = parse_qs(body, keep_blank_values=True)
        if self.sent is not None:
            text = "<p>Thank you."
        else:
            text = PAGES[self._task["kind"]](self._task, unquote(path), parse_qs(query))
        return None if text is None else ("text/html", (FRAME % tuple(self._task["margin"]) + text).encode())


Query = dict[str, list[str]]
Page = Callable[[Mapping[str, Any], str, Query], str | None]


def form(fields: str, button: str) -> str:
    return f"<form method=post autocomplete=off>{fields}<p><button>{button}</button></form>"


def button_page(task: Mapping[str, Any], path: str, query: Query) -> str:
    tiles = (f"<button class=tile name=colour value={one} style='background:{one}'></button>" for one in task["colours"])
    return f"<form method=post>{''.join(tiles)}</form>"


def form_page(task: Mapping[str, Any], path: str, query: Query) -> str:
    turned = f"rotate({task['tilt']} 100 45)"
    letters = f"<text x=30 y=60 transform='{turned}' style='font-size: 40px; letter-spacing: 6px'>{task['code']}</text>"
    picture = f"<svg width=200 height=90 style='border: 1px solid gray'>{letters}</svg>"
    return form(f"{picture}<p>Number: <input name=code size=8>", "Send")


def boxes_page(task: Mapping[str, Any], path: str, query: Query) -> str:
    boxes = (f"<label><input type=checkbox name=fruit value={one}> {one}</label>" for one in task["fruit"])
    return form("".join(boxes), "Save")


def search_page(task: Mapping[str, Any], path: str, query: Query) -> str | None:
    """The search and its results; each of these has a page, where it can be ordered."""
    prices: dict[str, int] = task["prices"]
    name = path.removeprefix("/")
    if name in prices:
        return form(f"<input type=hidden name=name value='{name}'><p>{name}, {prices[name]} dollars", "Order")
    if name:
        return None
    asked = query.get("q", [""])[0].strip().lower()
    found = [f"<li><a href='/{quote(one)}'>{one}</a>, {price}" for one, price in prices.items() if asked and asked in one]
    field = f"<form><input name=q size=14 value='{escape(asked)}'> <button>Search</button></form>"
    return field + ("".join(found) or "<p>Nothing was found." * bool(asked))


PAGES: Mapping[str, Page] = {"button": button_page, "form": form_page, "boxes": boxes_page, "search": search_page}
