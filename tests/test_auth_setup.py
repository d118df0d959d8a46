"""`kvbus auth init` and its permissions, without a server; the server only checks that it can read them."""

import stat
import subprocess
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner, Result

from kvbus.auth.conf import TlsFiles, server_conf
from kvbus.auth.roles import RANK_SAYS, SAYS, Party, permissions_of
from kvbus.auth.seeds import new_seed, public_of, read_seed
from kvbus.auth.setup import CONF, Access, ClientTls, parties_of
from kvbus.cli.auth import auth
from kvbus.embedded import find_binary
from kvbus.errors import ConfigError
from kvbus_schemas import EngineCard, PushOrdered
from kvbus_schemas.codec import KINDS

PARTIES = parties_of(["prefill:p0", "prefill:p1:2", "decode:d0:1"], routers=2, guests=["chooser"], own_matcher=True)


def kvbus_auth(*arguments: str) -> Result:
    """`kvbus auth ...`; an error of ours is its `exception`."""
    try:
        return CliRunner().invoke(auth, arguments)
    finally:
        structlog.reset_defaults()  # it logs to the runner's standard error, which is closed by now


def test_every_message_is_said_by_some_role() -> None:
    said = {kind for kinds in SAYS.values() for kind in kinds} | set(RANK_SAYS)
    assert set(KINDS) - said == {EngineCard}, "a card is a key of a bucket; all else needs a role in SAYS"


def test_only_the_matcher_orders_pushes() -> None:
    assert [role for role, kinds in SAYS.items() if PushOrdered in kinds] == ["matcher"]


@pytest.mark.parametrize("party", PARTIES, ids=lambda party: party.name)
def test_every_subject_that_may_be_published_to_names_the_party_itself(party: Party) -> None:
    for subject in permissions_of(party).publish:
        tokens = subject.split(".")
        if tokens[0] == "kvbus":
            place = {"v1": 4, "dead": 2, "mark": 2}[tokens[1]]
            assert tokens[place] in party.names
            assert not {"*", ">"} & set(tokens[: place + 1])


@pytest.mark.parametrize("party", [p for p in PARTIES if p.role != "operator"], ids=lambda party: party.name)
def test_nobody_but_the_operator_may_change_streams_or_use_all_of_an_api(party: Party) -> None:
    for subject in permissions_of(party).publish:
        assert not subject.startswith(("$JS.API.>", "$KV.>", "_INBOX", ">", "*"))
        if subject.startswith("$JS.API."):
            assert subject.split(".")[2:4] in (
                ["STREAM", "INFO"],
                ["DIRECT", "GET"],
                ["CONSUMER", "CREATE"],
                ["CONSUMER", "DELETE"],
            )


def test_engines_and_guests_cannot_read_the_trace_back() -> None:
    reads = {p.role for p in PARTIES if "$JS.API.DIRECT.GET.KVBUS" in permissions_of(p).publish}
    assert reads == {"matcher", "reuse", "router", "observer"}


def test_nats_server_takes_the_configuration(tmp_path: Path) -> None:
    access = Access(tmp_path / "auth")
    assert access.write(PARTIES) == [party.name for party in PARTIES]
    checked = subprocess.run([find_binary(), "-t", "-c", str(access.conf)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_seeds_are_for_their_owner_only_and_in_no_other_file(tmp_path: Path) -> None:
    access = Access(tmp_path / "auth")
    access.write(PARTIES)
    assert stat.S_IMODE(access.directory.stat().st_mode) == 0o700
    for party in PARTIES:
        file = access.seed_file(party.name)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        seed = read_seed(file)
        texts = [path.read_text() for path in access.directory.iterdir() if path != file]
        assert not any(seed in text for text in texts)
        assert public_of(seed) in access.conf.read_text()


def test_seeds_stay_unless_they_are_rotated(tmp_path: Path) -> None:
    access = Access(tmp_path / "auth")
    access.write(PARTIES)
    before = read_seed(access.seed_file("p0"))
    assert access.write([*PARTIES, Party(name="p9", role="prefill")]) == ["p9"]
    assert read_seed(access.seed_file("p0")) == before
    assert access.strangers(PARTIES) == ["p9"]
    access.write(PARTIES, rotate=True)
    assert read_seed(access.seed_file("p0")) != before


def test_an_environment_says_where_a_container_sees_its_files() -> None:
    access = Access(Path("auth"), seen_at="/run/auth", tls=ClientTls("/run/ca.pem"))
    assert access.environ("p0") == {
        "KVBUS_NAME": "p0",
        "KVBUS_NKEY_SEED_FILE": "/run/auth/p0.nk",
        "KVBUS_TLS_CA": "/run/ca.pem",
    }


def test_tls_files_are_quoted_and_clients_verified() -> None:
    text = server_conf([], TlsFiles('/a "b"/cert.pem', "/key.pem", "/ca.pem"))
    assert 'cert_file: "/a \\"b\\"/cert.pem"' in text
    assert "verify: true" in text


WRONG = [
    (["prefill"], "write prefill:ID"),
    (["worker:w0"], "write prefill:ID"),
    (["decode:"], "write prefill:ID"),
    (["decode:d:x"], "write prefill:ID"),
    (["decode:d:0"], "1 to 64 ranks"),
    (["decode:a b"], "cannot stand in a subject"),
    (["decode:d.*"], "cannot stand in a subject"),
    (["decode:d", "prefill:d"], "two parties would speak as 'd'"),
    (["decode:d", "prefill:d-r0"], "two parties would speak as 'd-r0'"),
    (["decode:router-0"], "two parties would speak as 'router-0'"),
    (["decode:matcher"], "nobody's name"),
]


@pytest.mark.parametrize(("engines", "text"), WRONG)
def test_names_that_cannot_be_are_refused(engines: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parties_of(engines)


def test_a_seed_of_another_kind_or_mistyped_is_none(tmp_path: Path) -> None:
    import nkeys  # type: ignore[import-untyped]

    account = nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_ACCOUNT).decode()
    for text in (account, new_seed()[:-4] + "AAAA", "x" * 10_000):
        (tmp_path / "seed.nk").write_text(text)
        with pytest.raises(ConfigError, match="holds no nkey seed") as caught:
            read_seed(tmp_path / "seed.nk")
        assert text not in str(caught.value)


def test_the_command_writes_everything_and_shows_no_seed(tmp_path: Path) -> None:
    done = kvbus_auth("init", str(tmp_path / "auth"), "--engine", "prefill:p0", "--at", "/run/auth")
    assert done.exit_code == 0, done.output
    assert "6 users, 6 of them with new seeds" in done.stdout
    assert (tmp_path / "auth" / CONF).exists()
    assert (tmp_path / "auth" / "p0.env").read_text() == "KVBUS_NAME=p0\nKVBUS_NKEY_SEED_FILE=/run/auth/p0.nk\n"
    assert (tmp_path / "auth" / "p0.nk").read_text().strip() not in done.output


@pytest.mark.parametrize("given", [["--tls-cert", "c"], ["--tls-client-ca", "a"], ["--engine", "p0"]])
def test_half_an_answer_is_wrong_usage(tmp_path: Path, given: list[str]) -> None:
    done = kvbus_auth("init", str(tmp_path / "auth"), *given)
    assert isinstance(done.exception, ConfigError)
    assert not (tmp_path / "auth").exists()
