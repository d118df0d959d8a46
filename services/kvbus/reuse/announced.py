"""Offers that have been heard a moment ago, whoever stores them. Pure, bounded."""

from kvbus_schemas import ReuseOffered

ANNOUNCED_S = 2.0
"""By then an offer is in the bucket, or whoever should have stored it has died; seconds."""
ANNOUNCED_MAX = 512
"""Conversations; an offer of 4,000 tokens takes 12 KB."""


class Announced:
    """The newest offer of each of the latest conversations. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[float, ReuseOffered]] = {}

    def note(self, offer: ReuseOffered, now_s: float) -> None:
        """An offer has been heard. A repeat does not make it younger."""
        _, known = self._heard.get(offer.conversation, (0.0, None))
        if known is not None and _speaker(known) == _speaker(offer) and offer.offer_seq <= known.offer_seq:
            return
        self._heard.pop(offer.conversation, None)
        self._heard[offer.conversation] = (now_s, offer)
        if len(self._heard) > ANNOUNCED_MAX:
            del self._heard[next(iter(self._heard))]

    def of(self, conversation: str, now_s: float) -> tuple[float, ReuseOffered | None]:
        """The conversation's newest offer and its age in seconds; None when none was heard within ANNOUNCED_S."""
        heard_s, offer = self._heard.get(conversation, (now_s, None))
        age_s = now_s - heard_s
        return (age_s, offer) if age_s <= ANNOUNCED_S else (0.0, None)


def _speaker(offer: ReuseOffered) -> tuple[str, str]:
    return offer.engine_id, offer.incarnation
