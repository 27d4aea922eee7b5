"""Who may see the page: on loopback this machine's browsers, elsewhere who has the token."""

from __future__ import annotations

import hmac
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from troupe.common.machine import is_loopback

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
MIN_TOKEN_CHARS = 16
HEALTH = "/healthz"
"""Says that the page is served, and nothing else: whoever restarts it need not have the token."""
_COOKIE = "troupe-board"


class Access:
    """Lets requests through that may see runs; every answer has the headers that keep a page to itself.

    Without a token a request has to name this machine in `Host`: a page of another site whose name was made
    to lead here names its own. A request that writes has to come from the page itself.
    """

    def __init__(self, app: ASGIApp, token: str = "") -> None:
        """Guard `app`; with "" for a token, every browser of this machine may see it."""
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if request.scope["path"] == HEALTH:
            return None
        if request.method not in ("GET", "HEAD") and not _is_own(request, host):
            return PlainTextResponse("only the page itself may write a note\n", 403)
        if not self._token:
            if is_loopback(_hostname(host)):
                return None
            return PlainTextResponse("this page is for localhost: open it by that name\n", 421)
        # Not of `request.url`, which has the host in it: that may be anything.
        given = request.query_params.get("token", "")
        if given and self._fits(given):
            # The token leaves the address, where histories and screenshots would keep it.
            answer: Response = RedirectResponse("./", 303)
            options: dict[str, Any] = {"httponly": True, "samesite": "strict", "path": "/"}
            options["secure"] = request.scope["scheme"] == "https"
            answer.set_cookie(_cookie(host), self._token, **options)
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._fits(request.cookies.get(_cookie(host), "")) or self._fits(bearer):
            return None
        return PlainTextResponse("open the address with its token, as `troupe board` printed it\n", 401)

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())


def _is_own(request: Request, host: str) -> bool:
    """Whether a browser says that the page that asks is this one; other programs say nothing."""
    origin = request.headers.get("origin")
    is_json = request.headers.get("content-type", "").partition(";")[0].strip() == "application/json"
    return is_json and (origin is None or origin.partition("://")[2] == host)


def _hostname(host: str) -> str:
    """The name in a `Host`; empty where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or "" if host.isascii() else ""
    except ValueError:  # half an IPv6 address
        return ""


def _cookie(host: str) -> str:
    """Of one board: cookies do not tell ports apart."""
    port = "".join(filter(str.isdecimal, host.rpartition(":")[2])) if ":" in host else ""
    return f"{_COOKIE}-{port}" if port else _COOKIE
