"""Settings: one frozen Struct per process, read once: flag, then environment, then file. A typo stops the start."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvbus.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)

ENV_FILE = "KVBUS_CONFIG"
"""Names a TOML file with one table per section, for example `[router]`."""


def load(
    settings: type[S],
    section: str,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> S:
    """Read `settings` for `section` (`router`, `matcher`, `engine`, ...).

    A value comes from `flags` (None means not given), else from `KVBUS_<SECTION>_<NAME>`, else for the names that
    all processes share from `KVBUS_<NAME>`, else from the file named by KVBUS_CONFIG, else from the Struct.
    Raises ConfigError on an unknown name or a value that does not fit.
    """
    environ = os.environ if environ is None else environ
    known = {field.name for field in msgspec.structs.fields(settings)}
    given = _from_file(section, environ)
    given |= _shared_from_environ(known, environ)
    given |= _from_environ(section, environ)
    given |= {name: value for name, value in (flags or {}).items() if value is not None}
    _refuse_unknown(given, known, section)
    try:
        return msgspec.convert(given, settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"setting of {section}: {error}") from error


def _shared_from_environ(known: set[str], environ: Mapping[str, str]) -> dict[str, Any]:
    return {name: environ[f"KVBUS_{name.upper()}"] for name in known if f"KVBUS_{name.upper()}" in environ}


def _from_environ(section: str, environ: Mapping[str, str]) -> dict[str, Any]:
    prefix = f"KVBUS_{section.upper()}_"
    return {name.removeprefix(prefix).lower(): value for name, value in environ.items() if name.startswith(prefix)}


def _from_file(section: str, environ: Mapping[str, str]) -> dict[str, Any]:
    name = environ.get(ENV_FILE)
    if not name:
        return {}
    try:
        tables = tomllib.loads(Path(name).read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {ENV_FILE}={name}: {error}") from error
    shared = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    return shared | dict(tables.get(section, {}))


def _refuse_unknown(given: Mapping[str, Any], known: set[str], section: str) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"unknown setting {name!r} of {section}: {hint}")
