"""Access on one machine, for `kvbus up`: open, or with keys in the work directory that are made when it starts."""

import os
from collections.abc import Iterable
from pathlib import Path

from kvbus.auth.provision import provision
from kvbus.auth.setup import OPERATOR, Access, parties_of
from kvbus.bus import Bus, BusSettings
from kvbus.errors import ConfigError
from kvbus.process import NAME_ENV, new_incarnation, process_name

DIRECTORY = "auth"


class LocalAccess:
    """`conf` is for nats-server, `environ` for a child, `join` for the process that starts them. All three are as
    without keys while `secure` was not called."""

    def __init__(self) -> None:
        self._access: Access | None = None

    @property
    def conf(self) -> Path | None:
        """What nats-server is to read."""
        return self._access.conf if self._access else None

    @property
    def directory(self) -> Path | None:
        """Where the keys are."""
        return self._access.directory if self._access else None

    def secure(self, work_dir: Path, engines: Iterable[str], *, routers: int, matchers: int, reuse: int) -> None:
        """Make keys and permissions for all that will run. `engines` are `prefill:ID` and `decode:ID`."""
        self._access = Access(work_dir / DIRECTORY)
        self._access.write(parties_of(engines, routers=routers, matchers=matchers, reuse=reuse))

    def environ(self, name: str) -> dict[str, str]:
        """The environment of the child `name`."""
        own = self._access.environ(name) if self._access else {}
        return {variable: value for variable, value in os.environ.items() if variable != NAME_ENV} | own

    async def join(self, nats: str) -> Bus:
        """The bus of the process that starts the others; with keys it is the operator's, and all streams are there."""
        if self._access is None:
            return await Bus.connect(BusSettings(nats=nats), name=process_name("up"), incarnation=new_incarnation())
        settings = BusSettings(nats=nats, nkey_seed_file=str(self._access.seed_file(OPERATOR)))
        bus = await Bus.connect(settings, name=OPERATOR, incarnation=new_incarnation())
        await provision(bus)
        return bus


def local_access(
    work_dir: Path, *, secure: bool, nats: str, prefill: int, decode: int, routers: int, matchers: int, reuse: int
) -> LocalAccess:
    """Access for so many processes. Raises ConfigError where NATS is somebody else's, who has its own keys."""
    access = LocalAccess()
    if secure and nats:
        raise ConfigError("--secure needs a nats-server of its own: leave out --nats, or use kvbus auth init there")
    if secure:
        engines = [f"prefill:prefill-{n}" for n in range(prefill)] + [f"decode:decode-{n}" for n in range(decode)]
        access.secure(work_dir, engines, routers=routers, matchers=matchers, reuse=reuse)
    return access
