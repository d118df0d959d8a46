"""A share of all requests goes to another router or policy, for a while. Pure.

It stands in one key of the bucket `subjects.ROUTING_BUCKET`, which every router watches, so that it is switched for
all of them at once; and it has a lifetime, so that one that everybody has forgotten ends by itself.
"""

import hashlib

import msgspec

from kvbus.errors import ConfigError
from kvbus_schemas import subjects

CANARY_KEY = "canary"
CANARY_TTL_MAX_S = 30 * 86_400.0
_POINTS = 2**64


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either a guest on the bus or a policy that is installed beside the router, and its share from 0 to 1."""

    share: float
    guest: str = ""
    policy: str = ""

    @property
    def name(self) -> str:
        """As people call it."""
        return f"guest {self.guest}" if self.guest else f"policy {self.policy}"

    def takes(self, conversation: str, request_id: str) -> bool:
        """Whether the request belongs to the share. All turns of a conversation do, or none; a greater share keeps
        those that the smaller one had."""
        if self.share >= 1.0:
            return True
        stable = f"{self.name}\0{conversation or request_id}".encode()
        point = int.from_bytes(hashlib.blake2b(stable, digest_size=8).digest(), "big")
        return point < self.share * _POINTS


def checked(canary: Canary) -> Canary:
    """`canary`, if it can be one. Raises ConfigError."""
    if bool(canary.guest) == bool(canary.policy):
        raise ConfigError("a canary is one guest or one policy: give --guest NAME or --policy NAME")
    if not 0.0 <= canary.share <= 1.0:
        raise ConfigError(f"the share must be between 0 and 1, not {canary.share:g}")
    if ":" in canary.policy:
        raise ConfigError(
            "a canary's policy must be an entry point of kvbus.policies: what is on the bus loads no code"
        )
    if canary.guest:
        try:
            subjects.token(canary.guest)
        except subjects.SubjectTokenError as error:
            raise ConfigError(str(error)) from None
    return canary


def encoded(canary: Canary) -> bytes:
    """As it stands in the bucket: JSON, so that `nats kv get kvbus_routing canary` shows it."""
    return msgspec.json.encode(canary)


def decoded(value: bytes) -> Canary:
    """What stands in the bucket. Raises ConfigError on what is none."""
    try:
        return checked(msgspec.json.decode(value, type=Canary))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"no canary: {error}") from None
