"""Permissions: NATS drops what is not allowed and says so only in passing; here that becomes an error."""

import re
import time
from collections.abc import Callable

from kvbus.errors import BusError

DENIAL_MEMORY_S = 5.0
"""For so long after a denial, more of the same raises at once; then it is tried again."""
DENIALS_MAX = 256

_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)
_KEYLESS_TOKENS = 6


class DeniedError(BusError):
    """The server's permissions forbid this subject to us."""

    def __init__(self, verb: str, subject: str, name: str) -> None:
        super().__init__(
            f"NATS does not let {name!r} {verb} {subject!r}: give its user that permission (see compose/nats.conf)"
        )


def _family(subject: str) -> str:
    """The subject without its key: a denial of one key is taken for a denial of all."""
    return ".".join(subject.lower().split(".")[:_KEYLESS_TOKENS])


class Denials:
    """What was denied lately. NATS reports subjects in lower case, so they are compared that way."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._publish: dict[str, float] = {}
        self._subscribe: set[str] = set()
        self._unreported: dict[str, DeniedError] = {}

    def note(self, text: str) -> str:
        """Take the server's words; the subject, in lower case, when they are a denial, else nothing."""
        found = _DENIED.search(text)
        if found is None:
            return ""
        subject = found[2].lower()
        if found[1].lower() == "subscription":
            self._subscribe.add(subject)
            return subject
        if len(self._unreported) < DENIALS_MAX:
            self._unreported[subject] = self.publish_error(subject)
        if len(self._publish) < DENIALS_MAX:
            self._publish[_family(subject)] = self._clock() + DENIAL_MEMORY_S
        return subject

    def publish_error(self, subject: str) -> DeniedError:
        """The error for a publish to `subject` that was denied."""
        return DeniedError("publish to", subject, self._name)

    def check_publish(self, subject: str) -> None:
        """Raise DeniedError when the like of it was denied within DENIAL_MEMORY_S."""
        if not self._publish:
            return
        family = _family(subject)
        until = self._publish.get(family)
        if until is None:
            return
        if self._clock() < until:
            raise self.publish_error(subject)
        del self._publish[family]

    def check_subscribe(self, subject: str) -> None:
        """Raise DeniedError, once, when the server has denied this subscription."""
        if subject.lower() in self._subscribe:
            self._subscribe.discard(subject.lower())
            raise DeniedError("subscribe to", subject, self._name)

    def check_all(self) -> None:
        """Raise the first denial of a publish that nobody has been told of, and forget the others."""
        unreported, self._unreported = self._unreported, {}
        for error in unreported.values():
            raise error

    def told(self, subject: str) -> None:
        """Somebody has been told of the denial of `subject` (in lower case) already."""
        self._unreported.pop(subject, None)

    def forget(self) -> None:
        """A new connection may have new permissions."""
        self._publish.clear()
        self._subscribe.clear()
        self._unreported.clear()
