"""Several matchers share the work by producer engine."""

import re
import zlib
from dataclasses import dataclass

from kvbus.errors import ConfigError
from kvbus_schemas import AnyMessage

_FORM = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Partition:
    """The `index`-th of `count` parts. All matchers of a bus must use the same `count`."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Partition":
        """`0/4`, or empty for all. Raises ConfigError."""
        if not text:
            return cls()
        found = _FORM.fullmatch(text)
        if found is None or not int(found[1]) < int(found[2]):
            raise ConfigError(f"setting partition of matcher is {text!r}: write for example '0/4' up to '3/4'")
        return cls(int(found[1]), int(found[2]))

    @property
    def lease_key(self) -> str:
        """The key of this part's lease."""
        return "matcher" if self.count == 1 else f"matcher-{self.index}-{self.count}"

    def owns(self, message: AnyMessage) -> bool:
        """True if the message is this part's; one that names no producer is everybody's."""
        producer_id = getattr(message, "producer_id", "")
        return not producer_id or zlib.crc32(producer_id.encode()) % self.count == self.index
