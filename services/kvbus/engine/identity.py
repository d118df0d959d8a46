"""Who an engine is, as all of its processes know it."""

from dataclasses import dataclass

from kvbus_schemas import Role


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
