"""Probes inside an engine: what happened to which request, and when. Only `kvbus bench handoff` loads them.

Every process of an engine appends `event<TAB>request<TAB>seconds` to a file of its own. Seconds are CLOCK_MONOTONIC,
which on Linux is the same for all processes. A note is one append to a list; a thread of its own writes them out, so
that nothing of it is in a hook's way.

    scheduler   allocated   blocks for KV from elsewhere are allocated
                start       the request is in a step's schedule for the first time
                finished    request_finished
                received    the ranks have reported that its KV has landed
    rank        forward     a forward pass has ended (no request)
                ordered     a registration, or an order, has reached the rank that writes
                write       a WRITE (pull: a READ) is about to be posted
                posted      it is posted
                landed      the rank reports that all of the request's KV has landed
"""

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

DIRECTORY_ENV = "KVBUS_BENCH_PROBES"
FLUSH_S = 0.25
REQUEST = re.compile(r"[0-9a-f]{32}")
"""The benchmark's request ids, inside vLLM's ids, landing notes and registrations."""


class Note(NamedTuple):
    """One line of a probe file."""

    event: str
    request: str
    at_s: float


class Recorder:
    """Collects notes and writes them to `directory`; without one, does nothing."""

    def __init__(self, directory: str) -> None:
        self._notes: list[tuple[str, Any, float]] = []
        self._file = Path(directory) / f"{os.getpid()}.probe" if directory else None
        if self._file is not None:
            threading.Thread(target=self._run, name="kvbus-probe", daemon=True).start()

    def note(self, event: str, request: Any = "") -> None:
        """`request`: any text or bytes that has the request's id somewhere."""
        if self._file is not None:
            self._notes.append((event, request, time.monotonic()))

    def flush(self) -> None:
        """Write out what there is."""
        assert self._file is not None
        notes, self._notes = self._notes, []
        if notes:
            with self._file.open("a") as file:
                file.writelines(f"{event}\t{request_in(request)}\t{at_s:.6f}\n" for event, request, at_s in notes)

    def _run(self) -> None:
        while True:
            time.sleep(FLUSH_S)
            self.flush()


def request_in(text: Any) -> str:
    """The benchmark's request id inside some text or bytes, or nothing."""
    found = REQUEST.search(text.decode("latin-1") if isinstance(text, bytes) else str(text))
    return found[0] if found else ""


def read_notes(directory: Path) -> list[Note]:
    """All notes of an engine, in the order of time. A last line that is not complete is left out."""
    notes = []
    for file in directory.glob("*.probe"):
        for line in file.read_text().split("\n")[:-1]:
            event, request, at_s = line.split("\t")
            notes.append(Note(event, request, float(at_s)))
    return sorted(notes, key=lambda note: note.at_s)


class Probed:
    """Mixed in before a connector class: notes its hooks. Knows neither vLLM nor which connector it is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorder = Recorder(os.environ.get(DIRECTORY_ENV, ""))
        self._started: set[str] = set()
        super().__init__(*args, **kwargs)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self.recorder.note("allocated", request.request_id)
        self._stock().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for request_id in scheduler_output.num_scheduled_tokens.keys() - self._started:
            self._started.add(request_id)
            self.recorder.note("start", request_id)
        return self._stock().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        for request_id in connector_output.finished_recving or ():
            self.recorder.note("received", request_id)
        self._stock().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self._finished(request)
        return self._stock().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._finished(request)
        return self._stock().request_finished_all_groups(request, block_ids)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.recorder.note("forward")
        self._stock().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self._stock().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving or ():
            self.recorder.note("landed", request_id)
        return results

    def _finished(self, request: Any) -> None:
        self._started.discard(request.request_id)
        self.recorder.note("finished", request.request_id)

    def _stock(self) -> Any:
        return super()


def note_calls(recorder: Recorder, owner: Any, method: str, events: tuple[str, str], key: str = "") -> None:
    """Note every call of `owner.method`: one event before and, if it has a name, one after.

    The request is in the keyword argument `key`, or in the first argument.
    """
    before, after = events
    call: Callable[..., Any] = getattr(owner, method)

    def noted(*args: Any, **kwargs: Any) -> Any:
        request = kwargs[key] if key else args[0]
        recorder.note(before, request)
        result = call(*args, **kwargs)
        if after:
            recorder.note(after, request)
        return result

    setattr(owner, method, noted)
