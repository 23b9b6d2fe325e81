"""An HTTP server for one visitor on this machine, on the loopback address, with a secret token in the path.

A request from another site's page is rejected by its ``Host``, ``Origin`` or ``Sec-Fetch-Site``. A request without the
token gets status 404. Request bodies have a size limit. An error is one sentence and a remedy, as JSON.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from locant.errors import InputError, LocantError
from locant.explore.document import modules, render_live_page, render_saved_page, stylesheet
from locant.explore.screens import answer, answer_link, as_json
from locant.explore.screens.results import start
from locant.explore.session import MAX_DROPPED, Session, State

HOSTS = ("127.0.0.1", "localhost", "[::1]")
MAX_SETTINGS = 2**18
"""The largest size of a screen's settings, in bytes."""

POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def new_token() -> str:
    """Return the secret part of the address, as strong as a password."""
    return secrets.token_urlsafe(18)


def application(session: Session, token: str) -> ASGIApp:
    """Return the explorer as an ASGI application behind its guard. Slow work runs in threads."""

    def page(request: Request) -> Response:
        return HTMLResponse(render_live_page())

    def file(request: Request) -> Response:
        path = request.path_params["path"]
        if path in modules():
            return Response(modules()[path], media_type="text/javascript")
        is_style = path == "style.css"
        return Response(stylesheet(), media_type="text/css") if is_style else PlainTextResponse("no such file", 404)

    async def alive(request: Request) -> Response:
        return Response(status_code=204)

    async def numbers(request: Request) -> Response:
        settings = await _settings(request)
        respond = answer_link if "link" in request.query_params else answer
        return await run_in_threadpool(lambda: _json(respond(request.path_params["screen"], settings, session)))

    async def drop(request: Request) -> Response:
        content = await _body(request, MAX_DROPPED, "a dropped file")
        return _json({"key": session.drop(request.query_params.get("name", "file"), content)})

    async def compare(request: Request) -> Response:
        settings = await _settings(request)
        return await run_in_threadpool(lambda: _json({"key": start(State(settings), session)}))

    async def stop(request: Request) -> Response:
        session.stop()
        return _json({})

    def save(request: Request) -> Response:
        settings = dict(request.query_params)
        screen = settings.pop("screen", "")
        shared = replace(session, is_shared=True)
        download = {"Content-Disposition": 'attachment; filename="locant.html"'}
        return HTMLResponse(render_saved_page(answer(screen, settings, shared)), headers=download)

    routes = [
        Route("/", page),
        Route("/page/{path:path}", file),
        Route("/alive", alive),
        Route("/numbers/{screen}", numbers, methods=["POST"]),
        Route("/files", drop, methods=["POST"]),
        Route("/comparisons", compare, methods=["POST"]),
        Route("/comparisons/stop", stop, methods=["POST"]),
        Route("/export", save),
    ]
    handlers: Any = {LocantError: _refuse, ClientDisconnect: _give_up, Exception: _fail}
    inner = Starlette(routes=routes, exception_handlers=handlers)
    inner.router.redirect_slashes = False  # it would redirect to an address without the token
    return _reject_foreign_requests(inner, token)


def _reject_foreign_requests(inner: ASGIApp, own_token: str) -> ASGIApp:
    """Pass on only requests from this machine's own page, and remove the token from their paths."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        _, token, *rest = [*request.url.path.split("/"), ""]
        if not _is_own(request):
            response = PlainTextResponse("this address answers only its own page\n", 403, HEADERS)
        elif not secrets.compare_digest(token.encode(), own_token.encode()):
            response = PlainTextResponse("not found: use the address that `locant explore` printed\n", 404, HEADERS)
        elif len(rest) == 1:
            response = Response(status_code=307, headers={**HEADERS, "Location": f"/{token}/"})
        else:
            path = "/" + "/".join(rest[:-1])
            await inner({**scope, "path": path, "raw_path": path.encode()}, receive, _with_headers(send))
            return
        await response(scope, receive, send)

    return guard


def _is_own(request: Request) -> bool:
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    origin = request.headers.get("origin", f"http://{host}")
    return (
        name in HOSTS
        and origin == f"http://{host}"
        and request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    )


def _with_headers(send: Send) -> Send:
    headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def sending(message: Any) -> None:
        starts = message["type"] == "http.response.start"
        await send({**message, "headers": [*message["headers"], *headers]} if starts else message)

    return sending


async def _body(request: Request, most: int, what: str) -> bytes:
    """Return the body, up to a limit. Read and drop the rest, so that a client that still sends gets the answer."""
    parts, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            parts += part
    if size > most:
        raise InputError(f"got {size:,} bytes for {what}, expected at most {most:,}", "send a smaller one")
    return bytes(parts)


async def _settings(request: Request) -> dict[str, str]:
    body = await _body(request, MAX_SETTINGS, "settings")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise InputError("got settings that are not a JSON object of texts", 'send {"length": "128"}')
    return values


def _json(value: Any, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type="application/json")


def _refuse(request: Request, error: LocantError) -> Response:
    return _json({"cause": error.cause, "remedy": error.remedy}, 422)


def _give_up(request: Request, error: ClientDisconnect) -> Response:
    """Answer a client that left in the middle of a body. This is not an error of the server."""
    return PlainTextResponse("got a part of the body, expected all of it; send it again\n", 400)


def _fail(request: Request, error: Exception) -> Response:
    cause = f"this is a mistake in locant: {type(error).__name__}: {error}"
    return _json({"cause": cause, "remedy": "report it with the output in the terminal"}, 500)


def run(session: Session, port: int, token: str, when_ready: Callable[[str], None]) -> None:
    """Serve until interrupted. `when_ready` is called with the address when the server accepts requests."""
    import torch
    import uvicorn

    # A screen is many small operations. On a busy machine, the threads of each operation would wait for each other.
    torch.set_num_threads(1)
    # If the protocol is named, asyncio sends every part of an answer at once. Otherwise the last part waits for 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen()
        when_ready(f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/")
        config = uvicorn.Config(
            application(session, token), lifespan="off", ws="none", log_level="warning", access_log=False,
            server_header=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        try:
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            session.stop(wait=True)
