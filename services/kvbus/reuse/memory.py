"""Why a conversation has no key (any more), as far as this process remembers. Pure, bounded, best effort."""

from kvbus_schemas.reuse import MissReason


class Memory:
    """The latest `conversations_max` conversations that this process has heard of."""

    def __init__(self, conversations_max: int) -> None:
        self._reasons: dict[str, MissReason] = {}
        self._conversations_max = conversations_max

    def note(self, conversation: str, reason: MissReason) -> None:
        """From now on, should its key be missing, this is why."""
        self._reasons.pop(conversation, None)
        self._reasons[conversation] = reason
        if len(self._reasons) > self._conversations_max:
            del self._reasons[next(iter(self._reasons))]

    def why_missing(self, conversation: str) -> MissReason:
        """`new` for what was never heard of, or too long ago."""
        return self._reasons.get(conversation, "new")
