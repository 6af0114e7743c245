"""By which names a server answers: a page elsewhere reaches it through a browser, by a name of that page's own."""

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class KnownHosts:
    """Refuses other hosts' names and other sites' pages (DNS rebinding); IP addresses are always known.

    Args:
        app: the application that answers the requests that pass.
        names: known beside ``localhost``, in lower case and without ports; ``*`` stands for every host.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self.app = app
        self.names = {"localhost", *names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers 403 where :meth:`_refusal` has a reason; what is not HTTP always passes."""
        reason = ""
        if scope["type"] == "http":
            reason = self._refusal(Headers(scope=scope))
        if reason:
            return await JSONResponse({"error": reason}, 403)(scope, receive, send)
        return await self.app(scope, receive, send)

    def _refusal(self, headers: Headers) -> str:
        """Why a request does not pass; "" where it does.

        A browser sends ``Origin`` with a page's requests: it must be of the very host and port of ``Host``.
        """
        host = headers.get("host", "").lower()
        if not self._known(host):
            return f"unknown host '{host[:60]}': hosts=NAME lets it pass"
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host:
            return "the page of another site asks"
        return ""

    def _known(self, host: str) -> bool:
        """Whether a ``Host`` header is one of the server's names, or an IP address."""
        try:
            parts = urlsplit(f"//{host}")
            if parts.netloc != host or parts.username is not None:
                return False
            if parts.hostname in self.names or "*" in self.names:
                return True
            ip_address(parts.hostname or "")
        except ValueError:  # not a host, or not an address
            return False
        return True
