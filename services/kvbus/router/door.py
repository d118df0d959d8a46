"""Who may come in, and as which tenant: open to all, or by API keys that are hashed at rest."""

from kvbus.auth.api_keys import ApiKeys
from kvbus.router.http import Headers, Request
from kvbus.router.problems import Unauthorized
from kvbus.router.settings import RouterSettings

OPEN_PAGES = frozenset((b"/health", b"/metrics"))
"""What needs no key: nothing of a client's is in it."""


class Door:
    """`check` every request; `tenant_of` scopes its conversations."""

    def __init__(self, settings: RouterSettings) -> None:
        self._keys = ApiKeys.load(settings.api_keys_file) if settings.api_keys_file else None
        self._tenant_header = settings.tenant_header.lower().encode()

    def check(self, request: Request) -> None:
        """Raise Unauthorized unless the router is open or the request carries one of its keys."""
        if self._keys is None or request.path in OPEN_PAGES:
            return
        if self._keys.tenant_of(_bearer(request.headers)) is None:
            raise Unauthorized("send an API key of this router as `Authorization: Bearer KEY`")

    def tenant_of(self, headers: Headers) -> str:
        """Who asks: the value of the configured header where it is sent, else the key's tenant, else the key itself on
        an open router, else nobody. They are told apart, so that none can pass for another. Hashed, never said."""
        for name, value in headers:
            if self._tenant_header and name == self._tenant_header:
                return "header " + value.decode("utf-8", "surrogateescape")
        bearer = _bearer(headers)
        if self._keys is not None:
            return "tenant " + (self._keys.tenant_of(bearer) or "")
        return "key " + bearer if bearer else ""


def _bearer(headers: Headers) -> str:
    """The first Authorization header, its scheme in lower case."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.partition(b" ")
            return (scheme.lower() + b" " + rest.strip()).decode("utf-8", "surrogateescape")
    return ""
