"""A Chromium for the rollouts of a process, and a tab of it as a model's tools.

What a model calls wrongly is text for it to read. A browser that cannot be started, dies or hangs raises SandboxError:
that is not the model's failure.
"""

import asyncio
import base64
import importlib.util
import json
import shutil
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from openai.types.chat import ChatCompletionToolParam

from areal_agent import ConfigError, SandboxError
from envs.browser.site import ORIGIN, Site
from envs.browser.tasks import INSTALL

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page, Route

FLAGS = (
    "--disable-gpu",
    "--disable-lcd-text",
    "--disable-smooth-scrolling",
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing is on a network, the site neither
)
TIMEOUT_S = 30.0
MAX_TEXT, MAX_SCROLL = 200, 10_000
KEYS = ("Enter", "Tab", "Shift+Tab", "Space", "Backspace", "Delete", "Escape", "ArrowLeft", "ArrowRight", "Control+A")
CALLS: dict[str, tuple[str, dict[str, type]]] = {
    "click": ("Click at a point, in pixels from the left and from the top of the picture.", {"x": int, "y": int}),
    "type": ("Type a text where the cursor is.", {"text": str}),
    "key": (f"Press a key: {', '.join(KEYS)}.", {"name": str}),
    "scroll": ("Scroll down by so many pixels; up, if they are negative.", {"dy": int}),
}
JSON_NAMES = {int: "integer", str: "string"}


class Tab:
    """One page of a site, for one rollout; from `Chromium.open`."""

    def __init__(self, page: "Page", width: int, height: int) -> None:
        self._page = page
        self._width, self._height = width, height

    async def picture(self) -> str:
        """Return what the window shows as the data URL of a PNG. Raises SandboxError."""
        with browser_faults():
            # a form that is sent marks its page before the call that sent it returns (site.py)
            await self._page.wait_for_function("() => !window.isLeft && document.readyState === 'complete'")
            png = await self._page.screenshot(animations="disabled", caret="hide", scale="css")
        return f"data:image/png;base64,{base64.b64encode(png).decode()}"

    async def call(self, name: str, arguments: str) -> str:
        """Make a call as the model wrote it, and return the text for it. Raises SandboxError."""
        if name not in CALLS:
            return f"Error: there is no tool {name!r:.50}; there are {', '.join(CALLS)}"
        parameters = CALLS[name][1]
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or {key: type(value) for key, value in values.items()} != parameters:
            wanted = ", ".join(f'"{key}": {JSON_NAMES[kind]}' for key, kind in parameters.items())
            return f"Error: call {name} with {{{wanted}}}"
        with browser_faults():
            return await getattr(self, f"_{name}")(**values)

    async def _click(self, x: int, y: int) -> str:
        if not (0 <= x < self._width and 0 <= y < self._height):
            return f"Error: the point is outside the window of {self._width} x {self._height} pixels"
        await self._page.mouse.click(x, y)
        return f"You clicked at {x}, {y}."

    async def _type(self, text: str) -> str:
        if len(text) > MAX_TEXT or not text.isprintable():
            return f"Error: only printable text of at most {MAX_TEXT} characters can be typed; press Enter by the tool key"
        await self._page.keyboard.insert_text(text)
        return "You typed it."

    async def _key(self, name: str) -> str:
        if name not in KEYS:
            return f"Error: there is no key {name!r:.50}; there are {', '.join(KEYS)}"
        await self._page.keyboard.press(name)
        return f"You pressed {name}."

    async def _scroll(self, dy: int) -> str:
        if abs(dy) > MAX_SCROLL:
            return f"Error: scroll by at most {MAX_SCROLL} pixels"
        at = await self._page.evaluate("(dy) => { scrollBy({top: dy, behavior: 'instant'}); return scrollY }", dy)
        return f"The window begins at {at:.0f} pixels of the page."


class Chromium:
    """The browser of a process; from `open_browser`. One that has died is started again for the next rollout."""

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._browser: Browser | None = None

    @asynccontextmanager
    async def open(self, site: Site, width: int, height: int) -> AsyncGenerator[Tab]:
        """Open a tab that shows `site` and reaches nothing else; it keeps nothing of other tabs. Raises SandboxError."""
        opening = asyncio.ensure_future(self._open(width, height))
        try:
            context = await asyncio.shield(opening)
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await end(await opening)  # nobody else knows it
            raise
        try:
            with browser_faults():
                context.set_default_timeout(TIMEOUT_S * 1000)
                await context.route("**/*", lambda route: answer(route, site))
                page = await context.new_page()
                await page.goto(ORIGIN)
            yield Tab(page, width, height)
        finally:
            await end(context)

    async def aclose(self) -> None:
        self._browser = None
        await self._stack.aclose()

    async def _open(self, width: int, height: int) -> "BrowserContext":
        with browser_faults():
            return await (await self._started()).new_context(
                viewport={"width": width, "height": height},
                locale="en-US",
                reduced_motion="reduce",
                accept_downloads=False,
                service_workers="block",
            )

    async def _started(self) -> "Browser":
        from playwright.async_api import async_playwright

        async with self._starting:
            if self._browser is None or not self._browser.is_connected():
                await self.aclose()
                playwright = await self._stack.enter_async_context(async_playwright())
                program = shutil.which("chromium")  # Debian's; else what `playwright install chromium` has fetched
                self._browser = await playwright.chromium.launch(executable_path=program, args=FLAGS)
            return self._browser


@asynccontextmanager
async def open_browser(_: object = None) -> AsyncGenerator[Chromium]:
    """Open the browser that all rollouts of a process share: `await rollout.shared(open_browser)`.

    Raises ConfigError where the package is missing.
    """
    if importlib.util.find_spec("playwright") is None:
        raise ConfigError(INSTALL)
    chromium = Chromium()
    try:
        yield chromium
    finally:
        await chromium.aclose()


def definitions() -> list[ChatCompletionToolParam]:
    """Return the tools in OpenAI's format."""
    made: list[ChatCompletionToolParam] = []
    for name, (description, parameters) in CALLS.items():
        properties = {key: {"type": JSON_NAMES[kind]} for key, kind in parameters.items()}
        schema: dict[str, Any] = {"type": "object", "properties": properties, "required": [*properties]}
        made.append({"type": "function", "function": {"name": name, "description": description, "parameters": schema}})
    return made


async def answer(route: "Route", site: Site) -> None:
    """Answer a request of a page: with what `site` has, or, if it goes elsewhere, with a failure."""
    from playwright.async_api import Error

    request = route.request
    url = urlsplit(request.url)
    with suppress(Error):  # the tab is gone
        if f"{url.scheme}://{url.netloc}" != ORIGIN:
            await route.abort()
        elif (found := site.answer(request.method, url.path, url.query, request.post_data or "")) is None:
            await route.fulfill(status=404, content_type="text/plain", body="There is no such page.")
        else:
            await route.fulfill(content_type=found[0], body=found[1])


async def end(context: "BrowserContext") -> None:
    from playwright.async_api import Error

    with suppress(Error):  # the browser is gone
        await context.close()


@contextmanager
def browser_faults() -> Generator[None]:
    from playwright.async_api import Error

    try:
        yield
    except Error as error:
        raise SandboxError(f"the browser failed: {error.message.splitlines()[0]}") from error
