"""The page in a real Chromium: a server in the test's own event loop, and a browser that talks to it."""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, Self

from playwright.async_api import Browser, Page

from areal_agent.view.recorded import RecordedRun
from areal_agent.view.server import serve

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Reader:
    """Somebody with a browser, who opens the pages of runs. What a page says or asks for is kept."""

    def __init__(self, browser: Browser, stack: AsyncExitStack) -> None:
        self._browser = browser
        self._stack = stack
        self.faults: list[str] = []  # errors of scripts, refusals of the page's policy, dialogs
        self.asked: list[str] = []  # addresses
        self.address = ""

    @classmethod
    @asynccontextmanager
    async def start(cls, browser: Browser) -> AsyncGenerator[Self]:
        """At the end all tabs are closed and all servers end, and no page may have had a fault."""
        async with AsyncExitStack() as stack:
            reader = cls(browser, stack)
            yield reader
        assert reader.faults == []
        assert all(one.startswith(("http://127.0.0.1:", "data:", "file:")) for one in reader.asked)

    async def open(self, *run_dirs: Path, at: str = "", **context: Any) -> Page:
        """Serve the page of these runs, and open it."""
        await self.serve(*run_dirs)
        return await self.visit(self.address + at, **context)

    async def serve(self, *run_dirs: Path, values: Path | None = None) -> None:
        runs = [self._stack.enter_context(closing(RecordedRun.open(one, None, values))) for one in run_dirs]
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve(runs, 0, address.set_result))
        self._stack.push_async_callback(_end, server)
        self.address = await address

    async def visit(self, address: str, **context: Any) -> Page:
        tab = await self._browser.new_context(**context)
        self._stack.push_async_callback(tab.close)
        page = await tab.new_page()
        page.set_default_timeout(30_000)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("dialog", lambda dialog: self.faults.append(dialog.message))
        page.on("console", lambda said: self.faults.append(said.text) if "Content Security" in said.text else None)
        await page.goto(address)
        return page


async def _end(server: asyncio.Task[None]) -> None:
    server.cancel()
    with suppress(asyncio.CancelledError):
        await server
