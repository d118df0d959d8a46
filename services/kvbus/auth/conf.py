"""`nats-auth.conf`: users with their permissions, and TLS, as nats-server reads them. Pure."""

from collections.abc import Iterable, Mapping

import msgspec

from kvbus.auth.roles import Party, Permissions, permissions_of

RESPONSES_MAX = 1
RESPONSE_EXPIRES = "10s"
"""After so long an answer is no longer allowed; askers wait 5 s at most."""


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths as the process in question sees them. With `ca`, clients must show a certificate of that authority."""

    cert: str
    key: str
    ca: str = ""


def server_conf(publics: Iterable[tuple[Party, str]], tls: TlsFiles | None = None) -> str:
    """What to include in nats-server's configuration. `publics` are the parties with their public keys."""
    users = "\n".join(_user(party, public, permissions_of(party)) for party, public in publics)
    text = (
        "# Made by `kvbus auth init`, which writes it anew. Holds public keys only.\n"
        f"authorization {{\n  users = [\n{users}\n  ]\n}}\n"
    )
    return text if tls is None else text + _tls(tls)


def _user(party: Party, public: str, allowed: Permissions) -> str:
    responses = f"\n        allow_responses: {{ max: {RESPONSES_MAX}, expires: {_quoted(RESPONSE_EXPIRES)} }}"
    return (
        f"    # {party.name} ({party.role})\n"
        f"    {{ nkey: {public}, permissions: {{\n"
        f"        publish: {{ allow: {_list(allowed.publish)} }}\n"
        f"        subscribe: {{ allow: {_list(allowed.subscribe)} }}"
        f"{responses if allowed.responses else ''}\n"
        "    } }"
    )


def _list(subjects: Iterable[str]) -> str:
    return "[\n" + "".join(f"          {_quoted(subject)}\n" for subject in subjects) + "        ]"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _tls(tls: TlsFiles) -> str:
    lines = [f"  cert_file: {_quoted(tls.cert)}", f"  key_file: {_quoted(tls.key)}"]
    if tls.ca:
        lines += [f"  ca_file: {_quoted(tls.ca)}", "  verify: true"]
    return "tls {\n" + "\n".join(lines) + "\n}\n"


def environ_text(environ: Mapping[str, str]) -> str:
    """An environment as a file that a shell, systemd and compose read."""
    return "".join(f"{name}={value}\n" for name, value in environ.items())
