"""What `kvbus auth init` makes of a list of parties: seeds, the server's configuration, an environment for each."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from kvbus.auth.conf import TlsFiles, environ_text, server_conf
from kvbus.auth.roles import RANKS_MAX, Party
from kvbus.auth.seeds import OWNER_ONLY_DIR, new_seed, public_of, read_seed, write_private, write_seed
from kvbus.errors import ConfigError
from kvbus_schemas import subjects

CONF = "nats-auth.conf"
RANKS = 8
"""Ranks that an engine gets unless it is said otherwise: a name that is not used does no harm."""
OPERATOR, OBSERVER = "operator", "observer"
PARTIES_MAX = 4096


class ClientTls(msgspec.Struct, frozen=True):
    """What processes need to reach a server with TLS, as paths that they see."""

    ca: str = ""
    cert: str = ""
    key: str = ""


def parties_of(
    engines: Iterable[str],
    *,
    routers: int = 1,
    matchers: int = 1,
    reuse: int = 1,
    observers: int = 1,
    guests: Sequence[str] = (),
    partitions: int = 1,
    own_matcher: bool = False,
) -> list[Party]:
    """Everybody, by name: `router-0`, `matcher-0`, `reuse-0`, `observer`, `operator`, and the engines, each given as
    `prefill:ID` or `decode:ID:RANKS`. Raises ConfigError."""
    parties = [_engine(text, own_matcher) for text in engines]
    parties += [Party(name=f"router-{number}", role="router") for number in range(routers)]
    parties += [Party(name=f"matcher-{number}", role="matcher", partitions=partitions) for number in range(matchers)]
    parties += [Party(name=f"reuse-{number}", role="reuse") for number in range(reuse)]
    parties += [Party(name=name, role="guest") for name in guests]
    parties += [
        Party(name=f"{OBSERVER}-{number}" if number else OBSERVER, role="observer") for number in range(observers)
    ]
    parties.append(Party(name=OPERATOR, role="operator"))
    _check(parties)
    return parties


def _engine(text: str, own_matcher: bool) -> Party:
    role, _, rest = text.partition(":")
    engine_id, _, ranks = rest.partition(":")
    if role not in ("prefill", "decode") or not engine_id or not (ranks or "1").isdecimal():
        raise ConfigError(
            f"--engine {text!r}: write prefill:ID or decode:ID, with :RANKS behind it for more than {RANKS}"
        )
    count = int(ranks or RANKS)
    if not 1 <= count <= RANKS_MAX:
        raise ConfigError(f"--engine {text!r}: an engine has 1 to {RANKS_MAX} ranks")
    kind: Literal["prefill", "decode"] = "prefill" if role == "prefill" else "decode"
    return Party(name=engine_id, role=kind, ranks=count, own_matcher=own_matcher and kind == "prefill")


def _check(parties: list[Party]) -> None:
    if len(parties) > PARTIES_MAX:
        raise ConfigError(f"{len(parties)} parties are more than {PARTIES_MAX}")
    reserved = ("matcher", "reuse", "all")  # whom messages are for, whichever process answers to it
    for name, count in Counter(name for party in parties for name in party.names).items():
        try:
            subjects.token(name)
        except subjects.SubjectTokenError as error:
            raise ConfigError(str(error)) from None
        if count > 1:
            raise ConfigError(f"two parties would speak as {name!r}: give each a name of its own")
        if name in reserved:
            raise ConfigError(f"{name!r} is nobody's name: messages are addressed to it. Choose another")


class Access:
    """The directory that `kvbus auth init` writes: `NAME.nk`, `NAME.env`, nats-auth.conf."""

    def __init__(self, directory: Path, *, seen_at: str = "", tls: ClientTls | None = None) -> None:
        self.directory = directory
        self._seen_at = seen_at or str(directory.resolve())
        self._tls = tls or ClientTls()

    @property
    def conf(self) -> Path:
        """What nats-server includes."""
        return self.directory / CONF

    def seed_file(self, name: str) -> Path:
        """Where the seed of a party is."""
        return self.directory / f"{name}.nk"

    def environ(self, name: str) -> dict[str, str]:
        """What a process needs in its environment to take part as `name`."""
        given = {"KVBUS_NAME": name, "KVBUS_NKEY_SEED_FILE": f"{self._seen_at}/{name}.nk"}
        tls = {"KVBUS_TLS_CA": self._tls.ca, "KVBUS_TLS_CERT": self._tls.cert, "KVBUS_TLS_KEY": self._tls.key}
        return given | {variable: path for variable, path in tls.items() if path}

    def write(self, parties: Iterable[Party], server_tls: TlsFiles | None = None, *, rotate: bool = False) -> list[str]:
        """Write everything; names whose seed is new. Seeds that are there stay, unless `rotate`. Raises ConfigError."""
        parties = list(parties)
        self.directory.mkdir(mode=OWNER_ONLY_DIR, parents=True, exist_ok=True)
        fresh, publics = [], []
        for party in parties:
            seed_file = self.seed_file(party.name)
            if rotate or not seed_file.exists():
                fresh.append(party.name)
                seed_file.unlink(missing_ok=True)
                write_seed(seed_file, new_seed())
            publics.append((party, public_of(read_seed(seed_file))))
            write_private(self.directory / f"{party.name}.env", environ_text(self.environ(party.name)))
        self.conf.write_text(server_conf(publics, server_tls), encoding="utf-8")
        return fresh

    def strangers(self, parties: Iterable[Party]) -> list[str]:
        """Seeds in the directory whose parties are no longer among `parties`: NATS refuses them."""
        known = {party.name for party in parties}
        return sorted(path.stem for path in self.directory.glob("*.nk") if path.stem not in known)
