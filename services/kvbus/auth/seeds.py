"""NKey seeds: made here, kept in files that only their owner may read, checked before they are used."""

import os
import secrets
from pathlib import Path
from typing import Any

from kvbus.errors import ConfigError

SEED_BYTES = 32
OWNER_ONLY = 0o600
OWNER_ONLY_DIR = 0o700


def new_seed() -> str:
    """A fresh seed of a user. Raises ConfigError without the library nkeys."""
    nkeys = _nkeys()
    return str(nkeys.encode_seed(secrets.token_bytes(SEED_BYTES), nkeys.PREFIX_BYTE_USER).decode())


def public_of(seed: str) -> str:
    """The public key of a user's seed, which starts with U. Raises ValueError, which never says the seed."""
    nkeys = _nkeys()
    try:
        prefix, raw = nkeys.decode_seed(bytearray(seed.encode("ascii")))
        same = nkeys.encode_seed(bytes(raw), prefix).decode() == seed  # the library checks no checksum
        public = str(nkeys.from_seed(bytearray(seed.encode("ascii"))).public_key.decode())
    except (nkeys.NkeysError, ValueError, TypeError) as error:
        raise ValueError(type(error).__name__) from None
    if prefix != nkeys.PREFIX_BYTE_USER or not same:
        raise ValueError("it is of another kind, or mistyped")
    return public


def read_seed(path: Path) -> str:
    """The seed in a file. Raises ConfigError that names the file and what to do, never its content."""
    try:
        seed = path.read_text(encoding="ascii").strip()
        public_of(seed)
    except OSError as error:
        raise ConfigError(f"cannot read the seed file {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(
            f"{path} holds no nkey seed of a user (one line, SU and 56 more characters): make one with kvbus auth init"
        ) from None
    return seed


def write_seed(path: Path, seed: str) -> None:
    """Write a new file that only its owner may read. Raises ConfigError where there is one already."""
    write_private(path, seed + "\n", new=True)


def write_private(path: Path, text: str, *, new: bool = False) -> None:
    """Write a file that only its owner may read, from its first byte on. With `new`, ConfigError if it exists."""
    path.parent.mkdir(mode=OWNER_ONLY_DIR, parents=True, exist_ok=True)
    target = path if new else path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    if target != path:
        target.replace(path)


def _nkeys() -> Any:
    try:
        import nkeys  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("nkeys are missing here: pip install 'kvbus[secure]'") from error
    return nkeys
