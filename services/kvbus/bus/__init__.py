"""The bus: typed messages on NATS. The only package that imports nats."""

from kvbus.bus.bucket import Bucket, Entry
from kvbus.bus.bus import Bus, Subscription
from kvbus.bus.denials import DeniedError
from kvbus.bus.errors import JetStreamError, KeyExistsError, NoRespondersError, RequestTimeoutError, RevisionError
from kvbus.bus.gaps import GapDetector
from kvbus.bus.inbound import Handler
from kvbus.bus.settings import BusCounters, BusSettings
from kvbus.bus.watch import Watch

__all__ = [
    "Bucket",
    "Bus",
    "BusCounters",
    "BusSettings",
    "DeniedError",
    "Entry",
    "GapDetector",
    "Handler",
    "JetStreamError",
    "KeyExistsError",
    "NoRespondersError",
    "RequestTimeoutError",
    "RevisionError",
    "Subscription",
    "Watch",
]
