"""A Chromium for the rollouts of a process, and a tab of it as a model's tools.

What a model calls wrongly is text for it to read. A browser that cannot be started, dies or hangs raises SandboxError:
that is not the model's failure.
"""

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import matplotlib

from areal_agent import SandboxError
from envs.browser.site import ORIGIN, Site

if TYPE_CHECKING:  # the extra
    from playwright.async_api import Browser, Page, Route

FLAGS = (
    "--disable-gpu",
    "--disable-lcd-text",
    "--disable-smooth-scrolling",
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # the site has no address either
)
FONTS = f"<fontconfig><dir>{matplotlib.get_data_path()}/fonts/ttf</dir></fontconfig>"  # the same on every machine
TIMEOUT_S = 60.0  # of each thing that is asked of it
MAX_TEXT, MAX_SCROLL = 200, 10_000
KEYS = ("Enter", "Tab", "Shift+Tab", "Space", "Backspace", "Delete", "Escape", "ArrowLeft", "ArrowRight", "Control+A")
CALLS: dict[str, tuple[str, dict[str, type]]] = {
    "click": ("Click at a point, in pixels from the left and from the top of the window.", {"x": int, "y": int}),
    "type": ("Type a text where the cursor is.", {"text": str}),
    "key": (f"Press a key: {', '.join(KEYS)}.", {"name": str}),
    "scroll": ("Scroll down by so many pixels; up, if they are negative.", {"dy": int}),
}
JSON_NAMES = {int: "integer", str: "string"}


def definition(name: str) -> Any:
    """Return a tool in OpenAI's format."""
    description, parameters = CALLS[name]
    properties = {key: {"type": JSON_NAMES[kind]} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [definition(name) for name in CALLS]


@dataclass(frozen=True, slots=True)
class Tab:
    """What one rollout has of the browser: a window of `width` x `height` pixels; from `Chromium.open`."""

    page: "Page"
    width: int
    height: int

    async def picture(self) -> str:
        """Return what the window shows as the data URL of a PNG. Raises SandboxError."""
        async with browser_faults():
            # A call that leaves a page has marked it when it returns (site.py).
            await self.page.wait_for_function("() => !window.isLeft && document.readyState === 'complete'")
            png = await self.page.screenshot(animations="disabled", caret="hide", scale="css")
        return f"data:image/png;base64,{base64.b64encode(png).decode()}"

    async def call(self, name: str, arguments: str) -> str:
        """Make a call as the model wrote it, and return the text for it. Raises SandboxError."""
        if name not in CALLS:
            return f"Error: there is no tool {name!r:.50}; there are {', '.join(CALLS)}"
        wanted = CALLS[name][1]
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or {key: type(value) for key, value in values.items()} != wanted:
            return f"Error: call {name} with {json.dumps({key: JSON_NAMES[kind] for key, kind in wanted.items()})}"
        async with browser_faults():
            return await self._made(name, values)

    async def _made(self, name: str, values: dict[str, Any]) -> str:
        match name, values:
            case "click", {"x": x, "y": y}:
                if not (0 <= x < self.width and 0 <= y < self.height):
                    return f"Error: the point is outside the window of {self.width} x {self.height} pixels"
                await self.page.mouse.click(x, y)
            case "type", {"text": text}:
                if len(text) > MAX_TEXT or not text.isprintable():
                    return f"Error: only {MAX_TEXT} printable characters can be typed at a time; for Enter call key"
                await self.page.keyboard.insert_text(text)
            case "key", {"name": key}:
                if key not in KEYS:
                    return f"Error: there is no key {key!r:.50}; there are {', '.join(KEYS)}"
                await self.page.keyboard.press(key)
            case _:
                dy = max(-MAX_SCROLL, min(values["dy"], MAX_SCROLL))
                await self.page.evaluate("(dy) => scrollBy({top: dy, behavior: 'instant'})", dy)
        return "Done."


class Chromium:
    """The browser of a process; from `open_browser`. One that has died is started again for later rollouts."""

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._browser: Browser | None = None

    @asynccontextmanager
    async def open(self, site: Site, width: int, height: int) -> AsyncGenerator[Tab]:
        """Open a tab that shows `site`, reaches nothing else and shares nothing with others. Raises SandboxError."""
        opening = asyncio.ensure_future(self._page(width, height))
        try:
            page = await asyncio.shield(opening)
            async with browser_faults():
                await page.context.route("**/*", lambda route: answer(route, site))
                await page.goto(ORIGIN)
            yield Tab(page, width, height)
        finally:
            with suppress(SandboxError):
                async with browser_faults():
                    await (await opening).context.close()

    async def aclose(self) -> None:
        self._browser = None
        await self._stack.aclose()

    async def _page(self, width: int, height: int) -> "Page":
        from playwright.async_api import async_playwright

        async with browser_faults():
            async with self._starting:
                if self._browser is None or not self._browser.is_connected():
                    await self.aclose()
                    playwright = await self._stack.enter_async_context(async_playwright())
                    fonts = Path(self._stack.enter_context(TemporaryDirectory())) / "fonts.conf"
                    fonts.write_text(FONTS)
                    self._browser = await playwright.chromium.launch(
                        executable_path=shutil.which("chromium"),  # Debian's; else what `playwright install` fetches
                        args=FLAGS,
                        env={**os.environ, "FONTCONFIG_FILE": str(fonts)},
                    )
                browser = self._browser
            try:
                return await browser.new_page(viewport={"width": width, "height": height})
            except BaseException:
                self._browser = None if self._browser is browser else self._browser  # it may be dead and not know it
                raise


def open_browser(_: object) -> AbstractAsyncContextManager[Chromium]:
    """Open the browser that all rollouts of a process share: `await rollout.shared(open_browser)`."""
    return aclosing(Chromium())


async def answer(route: "Route", site: Site) -> None:
    """Answer a request of a page: with what `site` has, or, if it goes elsewhere, with a failure."""
    from playwright.async_api import Error

    request = route.request
    url = urlsplit(request.url)
    with suppress(Error):  # the tab may be gone
        if f"{url.scheme}://{url.netloc}" != ORIGIN:
            await route.abort()
        elif (found := site.answer(request.method, url.path, url.query, request.post_data or "")) is None:
            await route.fulfill(status=404, body="There is no such page.")
        else:
            await route.fulfill(content_type="text/html", body=found)


@asynccontextmanager
async def browser_faults() -> AsyncGenerator[None]:
    """Turn the errors of the browser, and its silence, into SandboxError."""
    from playwright.async_api import Error

    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield
    except TimeoutError as error:
        raise SandboxError(f"the browser did not answer within {TIMEOUT_S:g} s") from error
    except Error as error:
        raise SandboxError(f"the browser failed: {error.message.splitlines()[0]}") from error
