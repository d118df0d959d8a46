"""API keys: hashed at rest, one tenant each, wrong ones refused."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.test_auth_setup import kvbus_auth

from kvbus.auth.api_keys import ApiKeys, digest_of, line_of, new_key, parse
from kvbus.errors import CommandFailed, ConfigError


def keys_of(tmp_path: Path, text: str) -> ApiKeys:
    (tmp_path / "keys").write_text(text)
    return ApiKeys.load(tmp_path / "keys")


def test_a_key_maps_to_its_tenant_bare_or_as_bearer(tmp_path: Path) -> None:
    a1, a2, b = new_key(), new_key(), new_key()
    keys = keys_of(tmp_path, f"# ours\n\n{line_of('a', a1)}\n{line_of('a', a2)}\n{line_of('b.c-d_e', b)}\n")
    assert len(keys) == 3
    assert [keys.tenant_of(key) for key in (a1, a2, b)] == ["a", "a", "b.c-d_e"]
    assert [keys.tenant_of(f"{word} {a1} ") for word in ("Bearer", "bearer", "BEARER ")] == ["a"] * 3


@pytest.mark.parametrize("bearer", ["", " ", "Bearer", "Bearer ", "Basic x", "kvbus_", "\ud800", "\x00", "x" * 100_000])
def test_what_is_no_key_has_no_tenant(tmp_path: Path, bearer: str) -> None:
    assert keys_of(tmp_path, line_of("a", new_key())).tenant_of(bearer) is None
    assert keys_of(tmp_path, "").tenant_of(bearer) is None


def test_the_stored_digest_is_no_key(tmp_path: Path) -> None:
    key = new_key()
    keys = keys_of(tmp_path, line_of("a", key))
    for stolen in (line_of("a", key), line_of("a", key).partition(":")[2], digest_of(key).hex(), key[:-1], key + "x"):
        assert keys.tenant_of(stolen) is None


@given(st.text())
def test_nothing_that_is_guessed_is_taken_and_nothing_raises(bearer: str) -> None:
    assert ApiKeys([("a", digest_of(new_key()))]).tenant_of(bearer) is None


WRONG = [
    "a",
    "a:sha256-00",
    f":sha256-{'0' * 64}",
    f"a b:sha256-{'0' * 64}",
    f"../x:sha256-{'0' * 64}",
    f"a:md5-{'0' * 64}",
    f"a:sha256-{'0' * 64} x",
]


@pytest.mark.parametrize("line", WRONG)
def test_a_malformed_line_is_named_by_its_number_and_not_shown(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="line 2 of") as caught:
        keys_of(tmp_path, f"# fine\n{line}\n")
    assert line not in str(caught.value).replace("kvbus auth key add", "") or line == "a"


def test_one_key_cannot_be_two_tenants() -> None:
    key = new_key()
    assert len(parse(f"{line_of('a', key)}\n{line_of('a', key)}")) == 1
    with pytest.raises(ConfigError, match="two tenants"):
        parse(f"{line_of('a', key)}\n{line_of('b', key)}")


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("none", "binary"):
        with pytest.raises(ConfigError, match=name):
            ApiKeys.load(tmp_path / name)


def test_the_commands_add_list_and_remove(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    a, b = (kvbus_auth("key", "add", tenant, "--file", str(file)).stdout.strip() for tenant in ("a", "b"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert a not in file.read_text()
    keys = ApiKeys.load(file)
    assert (keys.tenant_of(a), keys.tenant_of(b)) == ("a", "b")
    listed = kvbus_auth("key", "ls", "--file", str(file)).stdout
    assert listed.splitlines() == [f"a  {digest_of(a).hex()[:8]}", f"b  {digest_of(b).hex()[:8]}"]
    assert kvbus_auth("key", "remove", "a", "--file", str(file)).exit_code == 0
    assert (ApiKeys.load(file).tenant_of(a), ApiKeys.load(file).tenant_of(b)) == (None, "b")
    assert isinstance(kvbus_auth("key", "remove", "a", "--file", str(file)).exception, CommandFailed)
