"""Taking a permission away: the server's configuration without one subject of one party. Pure."""

import re


class UnknownPermissionError(ValueError):
    """Nobody of that name may say that."""


def without(conf: str, party: str, subject: str) -> str:
    """`conf` (`kvbus.auth.conf`) with no line of `party` that lets it publish what begins with `subject`. Raises
    UnknownPermissionError where there is none."""
    block = re.compile(rf"^    # {re.escape(party)} \(.*?^    \}} \}}$", re.MULTILINE | re.DOTALL)
    found = block.search(conf)
    line = re.compile(rf'^          "{re.escape(subject)}.*"\n', re.MULTILINE)
    if found is None or not line.search(found[0]):
        raise UnknownPermissionError(f"{party} may not publish {subject}")
    kept, _, heard = found[0].partition("subscribe:")
    return conf.replace(found[0], line.sub("", kept) + "subscribe:" + heard)
