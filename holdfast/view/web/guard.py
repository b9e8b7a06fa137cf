"""Lets in only who may come in, whatever a browser was made to send.

The page can be reached by any program and any website on the same machine, so being local proves
nothing. Three things are checked of every request:

- Its Host is one that this server was reached by or named with. A website whose name was made to point
  here (DNS rebinding) has another.
- It shows a secret: the cookie that a login link sets, or the link's token as `Authorization: Bearer`.
  There are two links. The first may do everything that this server allows; the second only looks.
- If it acts, it comes from this server's own page: its Origin is ours, and it has a header that no
  other website can add without asking first.

A login link carries its token in the query. It is answered with a page that sets the cookie and goes
on without the token; not with a redirect, because a browser that follows one from another website's
link would withhold the new cookie.
"""

from __future__ import annotations

import hashlib
import html
import secrets
from collections.abc import Sequence
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.view.web.keyfile import WebKey

Role = Literal["all", "view"]
ROLES: Final[tuple[Role, ...]] = ("all", "view")

ACTS_HEADER: Final = "x-holdfast"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
LOGIN: Final[dict[str, Role]] = {"token": "all", "view": "view"}
"""What the parameters of login links allow."""
ICON: Final = "/favicon.ico"
LOOPBACK: Final = ("127.0.0.1", "::1")


class Secrets:
    """The tokens of the two links, and the cookies that they set, all made from one key.

    A cookie is good for one port alone: browsers show it to every server of the same address, and one
    of these may be somebody else's."""

    def __init__(self, key: WebKey | None = None) -> None:
        self._key = WebKey(None) if key is None else key

    @property
    def tokens(self) -> dict[Role, str]:
        return {role: self._made("token", role) for role in ROLES}

    def cookies(self, port: int) -> dict[Role, str]:
        return {role: self._made("cookie", role, str(port)) for role in ROLES}

    def role_of_token(self, token: str) -> Role | None:
        return _matching(self.tokens, token)

    def role_of_cookie(self, cookie: str, port: int) -> Role | None:
        return _matching(self.cookies(port), cookie)

    def _made(self, *words: str) -> str:
        text = " ".join(words).encode()
        return hashlib.blake2b(text, key=self._key.current(), digest_size=24).hexdigest()


def _matching(known: dict[Role, str], shown: str) -> Role | None:
    for role, secret in known.items():
        if secrets.compare_digest(secret.encode(), shown.encode()):
            return role
    return None


class WebGuard:
    """Checks every request before the application sees it.

    `scope["role"]` says who it is from; `scope["admitted"]()`, whether its secret is still good."""

    def __init__(self, app: ASGIApp, secrets: Secrets, names: Sequence[str], port: int) -> None:
        self._app = app
        self._secrets = secrets
        self._names = {name.lower() for name in names}
        self._port = port
        self._cookie = f"holdfast-{port}"  # Cookies do not know ports: two servers would share one.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Answer a request that goes no further, or note its role."""
        headers = Headers(scope=scope)
        if not self._is_ours(headers.get("host", ""), scope):
            host = headers.get("host", "")
            return refused(421, f"this server is not {host!r}; name it with --host-name")
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"].startswith("/api/"):
            return refused(403, "requests of other websites are refused")
        if scope["path"] == ICON:  # Browsers ask for it by themselves, whatever they show.
            return Response(status_code=204)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        for parameter, role in LOGIN.items():
            if parameter in query and scope["method"] == "GET":
                return self._log_in(scope, role, query.pop(parameter), query)
        scope["role"] = self._role(headers)
        scope["admitted"] = lambda: self._role(headers) is not None
        if scope["role"] is None:
            return refused(401, "log in with the link that `holdfast web` printed")
        return self._refused_act(scope, headers) if scope["method"] not in ("GET", "HEAD") else None

    def _is_ours(self, host: str, scope: Scope) -> bool:
        """Whether a Host header names this server: by the address that was reached, or by its names."""
        name = host.rpartition(":")[0] if _has_port(host) else host
        name = name.strip("[]").lower()
        if name in self._names:
            return True
        address, port = (scope.get("server") or ("", None))[:2]
        if _has_port(host) and host.rpartition(":")[2] != str(port):
            return False
        return name == address or (name == "localhost" and address in LOOPBACK)

    def _log_in(self, scope: Scope, role: Role, token: str, rest: dict[str, str]) -> Response:
        if self._secrets.role_of_token(token) != role:
            why = "it is not complete, of another `holdfast web`, or was ended by --new-tokens"
            return refused(401, f"this link is not good: {why}")
        path = "/" + scope["path"].lstrip("/")  # Two slashes would begin the name of another host.
        onward = quote(path) + (f"?{urlencode(rest)}" if rest else "")
        response = HTMLResponse(
            '<!doctype html><meta charset="utf-8"><title>Holdfast</title>'
            f'<meta http-equiv="refresh" content="0; url={html.escape(onward)}">'
            f'<a href="{html.escape(onward)}">go on</a>',
            headers={"cache-control": "no-store"},
        )
        response.set_cookie(
            self._cookie,
            self._secrets.cookies(self._port)[role],
            httponly=True,
            samesite="strict",
            secure=scope["scheme"] == "https",
            path="/",
        )
        return response

    def _role(self, headers: Headers) -> Role | None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._secrets.role_of_token(token.strip())
        for piece in headers.get("cookie", "").split(";"):
            name, _, value = piece.strip().partition("=")
            if name == self._cookie:
                return self._secrets.role_of_cookie(value, self._port)
        return None

    def _refused_act(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["role"] != "all":
            return refused(403, "this link only looks; use the other link that was printed")
        if ACTS_HEADER not in headers:
            return refused(403, f"the header {ACTS_HEADER} is missing")
        origin = headers.get("origin")
        bearer = "authorization" in headers
        if origin is None and bearer:  # A program, not a browser: it had to know the token.
            return None
        if origin != f"{scope['scheme']}://{headers.get('host', '')}":
            return refused(403, "requests of other websites are refused")
        return None


def refused(status: int, error: str, **more: Any) -> Response:
    """Answer with a sentence."""
    return JSONResponse(
        {"error": error, **more}, status_code=status, headers={"cache-control": "no-store"}
    )


def _has_port(host: str) -> bool:
    return ":" in host.rpartition("]")[2]
