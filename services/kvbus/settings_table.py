"""Every setting of every process as Markdown: what the README shows, and a test compares."""

import msgspec

from kvbus.bus import BusSettings
from kvbus.console.settings import ConsoleSettings
from kvbus.engine.settings import EngineSettings
from kvbus.matcher.settings import MatcherSettings
from kvbus.observer.settings import ObserverSettings
from kvbus.reuse.settings import ReuseSettings
from kvbus.router.settings import RouterSettings
from kvbus_schemas.docs import field_docs

SECTIONS: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    ("Every process", "KVBUS_", BusSettings),
    ("`kvbus router`", "KVBUS_ROUTER_", RouterSettings),
    ("`kvbus engine`", "KVBUS_ENGINE_", EngineSettings),
    ("`kvbus matcher`", "KVBUS_MATCHER_", MatcherSettings),
    ("`kvbus reuse`", "KVBUS_REUSE_", ReuseSettings),
    ("`kvbus observer`", "KVBUS_OBSERVER_", ObserverSettings),
    ("`kvbus console`", "KVBUS_CONSOLE_", ConsoleSettings),
)


def markdown() -> str:
    """One table for each process; what all share stands once."""
    return "\n".join(_table(title, prefix, kind) for title, prefix, kind in SECTIONS)


def _table(title: str, prefix: str, kind: type[msgspec.Struct]) -> str:
    shared = set() if kind is BusSettings else set(BusSettings.__struct_fields__)
    docs = field_docs(kind)
    rows = [
        f"| `{field.name}` | `{_shown(field.default)}` | {' '.join(docs.get(field.name, '').split())} |"
        for field in msgspec.structs.fields(kind)
        if field.name not in shared
    ]
    head = f"**{title}** (environment: `{prefix}<NAME>`)\n\n| setting | default | meaning |\n| --- | --- | --- |\n"
    return head + "\n".join(rows) + "\n"


def _shown(default: object) -> str:
    return repr(default) if isinstance(default, str | tuple) else str(default)
