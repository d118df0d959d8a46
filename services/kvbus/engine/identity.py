"""Who an engine is, as all of its processes know it."""

from dataclasses import dataclass

from kvbus import __version__
from kvbus_schemas import EngineCard, Role

MATCHES_ITSELF = "matcher"
"""Capability of a prefill that pairs its own transfers: matcher processes leave them alone."""


@dataclass(slots=True)
class Identity:
    """One engine; `engine_id` is its stable name, `incarnation` is new at every start."""

    engine_id: str
    incarnation: str
    role: Role
    model: str
    block_size: int
    num_blocks: int
    tp_size: int
    pp_size: int
    max_model_len: int
    vllm_version: str
    compat_hash: str = ""
    """Known once the ranks have registered their memory."""
    kv_layout: str = ""

    @property
    def nixl_id(self) -> str:
        """The engine's name in NIXL's tables: unlike engine_id it never comes back after a restart."""
        return f"{self.engine_id}.{self.incarnation}"

    def card(
        self,
        *,
        http_url: str,
        progressive: bool,
        own_matcher: bool,
        agent_metadata: dict[str, bytes],
        cache_events: bool = False,
    ) -> EngineCard:
        """What the engine says of itself; lease and draining are added where the card is put."""
        have = {"push": True, "progressive": progressive, "reuse": True, MATCHES_ITSELF: own_matcher}
        have["cache"] = cache_events
        return EngineCard(
            source=self.engine_id,
            incarnation=self.incarnation,
            engine_id=self.engine_id,
            role=self.role,
            model=self.model,
            http_url=http_url,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            kv_layout=self.kv_layout,
            compat_hash=self.compat_hash,
            vllm_version=self.vllm_version,
            kvbus_version=__version__,
            max_model_len=self.max_model_len,
            capabilities=[name for name, there in have.items() if there],
            agent_metadata=agent_metadata,
        )
