"""kvbus's own errors. Each says what is wrong and what to do.

KvbusError
├── ConfigError      the user's settings or command line (exit code 2)
├── BusError         NATS: unreachable, refused, missing JetStream
├── EngineError      a vLLM engine: will not start, wrong version, incompatible peer
└── CommandFailed    the work that a command was asked for did not succeed (exit code 1)

The wire's errors (TicketError, UndecodableError, MessageTooLargeError) live with the wire, in kvbus_schemas.
"""


class KvbusError(Exception):
    """Anything that kvbus itself reports. The text is for the user."""


class ConfigError(KvbusError):
    """A setting or an argument is wrong; nothing was started."""


class BusError(KvbusError):
    """The bus cannot be used as asked."""


class EngineError(KvbusError):
    """A vLLM engine cannot do what was asked."""


class CommandFailed(KvbusError):  # noqa: N818  (an outcome that is reported, not a fault)
    """The command ran and its work failed."""
