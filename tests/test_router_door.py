"""Who may come in."""

from pathlib import Path

import aiohttp
import pytest

from kvbus.auth.api_keys import line_of, new_key
from kvbus.embedded import EmbeddedNats
from kvbus.errors import ConfigError
from kvbus.process import new_incarnation
from kvbus.router.door import Door
from kvbus.router.service import Router
from kvbus.router.settings import RouterSettings

pytestmark = pytest.mark.nats


async def _status(url: str, headers: dict[str, str] | None = None) -> int:
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as response:
        return response.status


async def test_a_router_with_keys_lets_in_only_who_has_one(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    key = new_key()
    keys = tmp_path / "keys"
    keys.write_text(line_of("tenant-a", key) + "\n")
    settings = RouterSettings(nats=nats_server.url, port=0, api_keys_file=str(keys))
    router = Router(settings, name="router-door", incarnation=new_incarnation())
    await router.start()
    try:
        models = router.url + "/v1/models"
        assert await _status(models) == 401
        assert await _status(models, {"Authorization": "Bearer somebody-else"}) == 401
        assert await _status(models, {"Authorization": f"Bearer {key}"}) == 200
        assert await _status(router.url + "/metrics") == 200
    finally:
        await router.close()


async def test_two_keys_of_one_tenant_are_one_tenant(tmp_path: Path) -> None:
    first, second, other = new_key(), new_key(), new_key()
    keys = tmp_path / "keys"
    keys.write_text("\n".join([line_of("a", first), line_of("a", second), line_of("b", other)]) + "\n")
    door = Door(RouterSettings(api_keys_file=str(keys)))
    names = [door.tenant_of([(b"authorization", f"Bearer {key}".encode())]) for key in (first, second, other)]
    assert names == ["tenant a", "tenant a", "tenant b"]


def test_a_file_of_keys_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the API keys"):
        Door(RouterSettings(api_keys_file=str(tmp_path / "missing")))
