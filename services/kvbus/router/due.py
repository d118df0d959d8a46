"""Conversations whose last turn has just ended here, and whose offer is therefore on its way. Pure, bounded."""

DUE_S = 0.1
"""An offer that was not heard of so long after its turn, in seconds, is not waited for."""
DUE_MAX = 4096


class Due:
    """Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._ended: dict[str, float] = {}

    def ended(self, conversation: str, now_s: float) -> None:
        """A turn has ended: decode offers its blocks."""
        self._ended.pop(conversation, None)
        self._ended[conversation] = now_s
        while len(self._ended) > DUE_MAX or now_s - next(iter(self._ended.values())) > DUE_S:
            del self._ended[next(iter(self._ended))]

    def taken(self, conversation: str) -> None:
        """The offer has come, and a turn has it: nobody else need wait for it."""
        self._ended.pop(conversation, None)

    def expects(self, conversation: str, now_s: float) -> bool:
        """True while it is worth asking once more."""
        ended_s = self._ended.get(conversation)
        return ended_s is not None and now_s - ended_s <= DUE_S
