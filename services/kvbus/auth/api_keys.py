"""API keys of clients: each maps to a tenant, and only its digest is kept.

A key is 32 random bytes, so that one pass of SHA-256 hides it: there is nothing to guess. The file has lines
`tenant:sha256-<64 hexadecimal digits>`, one per key; blank lines and lines that begin with `#` are left out.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from kvbus.errors import ConfigError

PREFIX = "kvbus_"
SECRET_BYTES = 32
BEARER_CHARS_MAX = 512
KEYS_MAX = 100_000
DIGEST_PREFIX = "sha256-"

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(rf"([^:\s]+):{DIGEST_PREFIX}([0-9a-f]{{64}})")


class ApiKeys:
    """The keys of one file, as it was when it was read. Pure once loaded."""

    def __init__(self, digests: Iterable[tuple[str, bytes]]) -> None:
        """`digests` are (tenant, SHA-256 of the key)."""
        self._blind = secrets.token_bytes(32)
        self._tenants = {self._blinded(digest): (digest, tenant) for tenant, digest in digests}

    def __len__(self) -> int:
        return len(self._tenants)

    @classmethod
    def load(cls, path: str | Path) -> "ApiKeys":
        """Read a file. Raises ConfigError, which names the line and never what is in it."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys in {path}: {type(error).__name__}") from None
        return cls(parse(text, str(path)))

    def tenant_of(self, bearer: str) -> str | None:
        """The tenant of a key, given bare or as the whole header `Bearer KEY`; None for what is no key of the file.

        Takes as long for a wrong key as for a right one: it is looked up by a digest under a secret of this process,
        so that time tells nothing of what is stored, and then compared in constant time.
        """
        digest = digest_of(_bare(bearer))
        found = self._tenants.get(self._blinded(digest))
        known, tenant = found if found is not None else (bytes(len(digest)), None)
        return tenant if hmac.compare_digest(known, digest) else None

    def _blinded(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, digest_size=16, key=self._blind).digest()


def parse(text: str, where: str = "the API keys") -> list[tuple[str, bytes]]:
    """(tenant, digest) of each line. Raises ConfigError."""
    found: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or not _TENANT.fullmatch(match[1]):
            raise ConfigError(f"line {number} of {where} is no `tenant:{DIGEST_PREFIX}...`: use kvbus auth key add")
        if found.setdefault(bytes.fromhex(match[2]), match[1]) != match[1]:
            raise ConfigError(f"line {number} of {where} gives one key to two tenants")
        if len(found) > KEYS_MAX:
            raise ConfigError(f"{where} has more than {KEYS_MAX} keys")
    return [(tenant, digest) for digest, tenant in found.items()]


def new_key() -> str:
    """A fresh key. It is shown once and kept nowhere."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def line_of(tenant: str, key: str) -> str:
    """The line of a key. Raises ConfigError on a tenant's name that cannot stand in the file."""
    return f"{checked_tenant(tenant)}:{DIGEST_PREFIX}{digest_of(key).hex()}"


def checked_tenant(tenant: str) -> str:
    """The name, or ConfigError."""
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(f"tenant {tenant[:80]!r}: use 1 to 64 letters, digits, '.', '_' or '-'")
    return tenant


def digest_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _bare(bearer: str) -> str:
    bearer = bearer[: BEARER_CHARS_MAX + 1].strip()
    scheme, _, rest = bearer.partition(" ")
    return rest.strip() if scheme.lower() == "bearer" else bearer
