"""Gaps in what a sender counted: the only sign that core NATS lost something."""

from collections import OrderedDict

from kvbus_schemas import Message

SENDERS_MAX = 4096


class GapDetector:
    """Judges sequence numbers per sender and incarnation. Feed it only from a subscription to the whole bus.

    The first message of an incarnation sets the start, since an observer may join late. Repeats and old messages
    are no gaps. The sender heard longest ago is forgotten beyond `senders_max`.
    """

    def __init__(self, senders_max: int = SENDERS_MAX) -> None:
        self._highest: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._senders_max = senders_max

    def observe(self, message: Message) -> int:
        """How many of the sender's messages are missing just before this one."""
        if message.seq <= 0:
            return 0
        sender = (message.source, message.incarnation)
        highest = self._highest.pop(sender, message.seq - 1)
        self._highest[sender] = max(highest, message.seq)
        if len(self._highest) > self._senders_max:
            self._highest.popitem(last=False)
        return max(0, message.seq - highest - 1)
