"""The page's server: files of the page, and what a run recorded as JSON. It listens on loopback alone and only reads.

    /KEY/                         the page (areal_agent/view/page/)
    /KEY/api/runs                 the folders of the runs
    /KEY/api/N/state              run N: its status, and rows of metrics from `offset` on
    /KEY/api/N/rollouts           rollouts from `cursor` on, by filters
    /KEY/api/N/rollout            the rollout `session`
    /KEY/api/N/tokens             the tokens of `turn` in `session`
    /KEY/images/N/DIGEST          an image that its conversations refer to
    /KEY/export/N                 the rollout `session` as one HTML file

A random key is part of every address, and `HostCheck` refuses calls from pages elsewhere, so that no web page that the
reader has open can ask for anything. The page loads nothing from elsewhere, which its Content-Security-Policy enforces.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from areal_agent.errors import ArealAgentError, ConfigError, LedgerError, RequestError
from areal_agent.gateway.auth import HostCheck
from areal_agent.images import content_type
from areal_agent.view.export import export
from areal_agent.view.recorded import RecordedRun
from areal_agent.view.trajectory import RecordedRollout

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_ADDRESS_BYTES = 2**16
"""A search for 2,000 characters, the longest that the page sends, fits any of them."""
PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
WRONG_KEY = "This is not the address that `python -m areal_agent.view` printed: the key in it is missing or wrong."

FROM_ELSEWHERE = "other names and web pages may not ask; open the address that was printed, or `ssh -L` to it."

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(runs: Sequence[RecordedRun], port: int, started: Callable[[str], None]) -> None:
    """Serve the page until cancelled; call `started` with its address once it answers. Port 0 takes a free one.

    Raises ConfigError when the port cannot be listened on.
    """
    key = secrets.token_urlsafe(24)
    runner = web.AppRunner(make_app(runs, key), access_log=None, shutdown_timeout=0.5, max_line_size=MAX_ADDRESS_BYTES)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"--port {port} cannot be listened on: {error.strerror}; leave it out") from None
        started(f"http://{HOST}:{runner.addresses[0][1]}/{key}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def make_app(runs: Sequence[RecordedRun], key: str) -> web.Application:
    """Return the application that shows the runs to those who have the key."""
    check, page = HostCheck([]), {path.name: path.read_bytes() for path in PAGE.iterdir()}

    @web.middleware
    async def guard(request: web.Request, handler: Reply) -> web.StreamResponse:
        reply = await _answer(request, handler, check, key)
        reply.headers.update(HEADERS)
        return reply

    async def file(request: web.Request) -> web.Response:
        name = request.match_info["name"] or "index.html"
        if name not in page:
            raise RequestError(f"there is no {name!r:.80}; the page is at the address that was printed", status=404)
        return web.Response(body=page[name], content_type=TYPES[Path(name).suffix], charset="utf-8")

    async def names(_request: web.Request) -> web.Response:
        return _json([str(run.path.parent) for run in runs])

    async def state(request: web.Request) -> web.Response:
        run = _run(runs, request)
        return _json(await run.ask(run.state, _number(request.query.get("offset", "0"), "offset")))

    async def rollouts(request: web.Request) -> web.Response:
        run, filters = _run(runs, request), dict(request.query)
        cursor = [_number(one, "cursor") for one in filters.pop("cursor", "").split(",") if one]
        return _json(await run.ask(run.rollouts, filters, cursor))

    async def rollout(request: web.Request) -> web.Response:
        return await about(request, lambda one: _json(one.describe()))

    async def tokens(request: web.Request) -> web.Response:
        return await about(request, lambda one: _json(one.tokens(request.query.get("turn", ""))))

    async def image(request: web.Request) -> web.Response:
        data = await asyncio.to_thread(_run(runs, request).images.read, request.match_info["digest"])
        if (kind := content_type(data)) is None:
            raise RequestError("this file is neither PNG, JPEG nor WebP, so it is not shown", status=404)
        return web.Response(body=data, content_type=kind)

    async def exported(request: web.Request) -> web.Response:
        name = re.sub(r"[^\w.-]", "_", request.query.get("session", ""), flags=re.ASCII)
        headers = {"Content-Disposition": f'attachment; filename="rollout-{name}.html"'}
        return await about(
            request,
            lambda one: web.Response(
                text=export(one, page), content_type="text/html", charset="utf-8", headers=headers
            ),
        )

    async def about(request: web.Request, answer: Callable[[RecordedRollout], web.Response]) -> web.Response:
        """Answer with what is known of a rollout, in the thread of its run."""
        run, session = _run(runs, request), request.query.get("session", "")
        return await run.ask(
            lambda snapshot: answer(
                RecordedRollout.read(snapshot, run.transcript, run.path.parent, session, run.values(session))
            )
        )

    app = web.Application(middlewares=[guard])
    under = "/{key}"
    for path, handler in {
        "/api/runs": names,
        "/api/{run}/state": state,
        "/api/{run}/rollouts": rollouts,
        "/api/{run}/rollout": rollout,
        "/api/{run}/tokens": tokens,
        "/images/{run}/{digest}": image,
        "/export/{run}": exported,
        "/{name:[^/]*}": file,
    }.items():
        app.router.add_get(under + path, handler)
    return app


async def _answer(request: web.Request, handler: Reply, check: HostCheck, key: str) -> web.StreamResponse:
    """Answer a request that may be made; any other, and any failure, with one line."""
    try:
        try:
            check.check(request)
        except RequestError as error:
            asked = ", ".join(f"{name} {request.headers.get(name)!r:.80}" for name in ("Host", "Origin"))
            raise RequestError(f"{asked}: {FROM_ELSEWHERE}", status=error.status) from error
        if not secrets.compare_digest(request.path.strip("/").partition("/")[0].encode(), key.encode()):
            raise RequestError(WRONG_KEY, status=403)
        if request.path == f"/{key}":
            return web.Response(status=308, headers={"Location": f"/{key}/"})
        return await handler(request)
    except RequestError as error:
        return web.Response(status=error.status, text=error.message)
    except web.HTTPException as error:
        return web.Response(status=error.status, text=f"{error.reason}: {request.method} {request.path!r:.80}")
    except LedgerError as error:
        return web.Response(status=422, text=str(error))
    except ArealAgentError as error:
        return web.Response(status=400, text=str(error))
    except Exception as error:  # a record that nobody thought of: the page says so, and goes on
        logger.exception("%s %s", request.method, request.rel_url.query_string)
        return web.Response(status=500, text=f"This could not be read: {type(error).__name__}: {error!s:.200}")


def _run(runs: Sequence[RecordedRun], request: web.Request) -> RecordedRun:
    number = _number(request.match_info["run"], "the run")
    if number >= len(runs):
        raise RequestError(f"there is no run {number}; the page shows {len(runs)}", status=404)
    return runs[number]


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestError(f"{what} is {text!r:.80}; give a number from 0 on")
    return int(text)


def _json(value: Mapping[str, Any] | Sequence[Any]) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
