"""By which names a server answers: a page elsewhere reaches it through a browser, by a name of that page's own."""

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class KnownHosts:
    """Refuses other hosts' names and other sites' pages (DNS rebinding); IP addresses are always known.

    The name ``*`` stands for every host.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self.app, self.names = app, {"localhost", *names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, origin = headers.get("host", "").lower(), headers.get("origin")
            if not self._known(host):
                refused = f"unknown host '{host[:60]}': hosts=NAME lets it pass"
                return await JSONResponse({"error": refused}, 403)(scope, receive, send)
            if origin is not None and origin.lower().partition("://")[2] != host:
                return await JSONResponse({"error": "the page of another site asks"}, 403)(
                    scope, receive, send
                )
        return await self.app(scope, receive, send)

    def _known(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            plain = parts.netloc == host and parts.username is None
            return plain and (
                bool({parts.hostname, "*"} & self.names) or bool(ip_address(parts.hostname or ""))
            )
        except ValueError:
            return False
