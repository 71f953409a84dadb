"""Watches over the ranks of a run, so that one that is killed or hangs ends all the others, and one message names it.

Each rank has a thread that writes a beat to the run's store twice a second, and looks there for a verdict. A rank in trouble (its
collective failed or timed out, it makes no progress, a launcher sends it SIGTERM) compares two beats of every other rank: who is
gone or stopped has none between them. It writes the verdict and says it; the others find it and end in silence.

    beat/RANK   BEATS MOVES WHERE, or "left"        verdict   JSON, and the first one counts

The store belongs to rank 0, or to torchrun on its node: when that is gone, every rank says so for itself. A main thread that
cannot be reached (in a kernel, in a collective that does not give up) is ended by the thread; a thread that is held up itself, by
faulthandler's timer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.exits import StoppedEarly
from megatron_lite.training.pulse import START_UP, Pulse

BEAT_S = 0.5
SILENT_S = 2.5      # without a beat for so long a rank counts as gone or stopped
GRACE_S = 5.0       # for the main thread to end by itself once there is a verdict
BACKSTOP_S = 60.0   # after the limit of the watch: faulthandler's timer
STORE_S = 10.0      # for one request to the store
LEFT = "left"
LOST = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "pair closure", "NCCL remote", "remote process")
LATE = ("Timed out waiting", "timed out", "Watchdog caught collective operation timeout")


class Verdict(NamedTuple):
    """Why the run ends, by the rank that says so. status: of every process. with_stacks: all ranks write theirs."""

    rank: int
    status: int
    text: str
    with_stacks: bool = False


@dataclass
class _Trouble:
    """What made a rank ask who is alive: "lost", "late" or "signal". before: the beats of that moment, `since`."""

    what: str
    number: int = 0
    since: float = 0.0
    before: dict[int, str] | None = None


class Watch:
    """Context manager around all that a rank does after it has joined; only the main thread may enter. One rank is not watched.

    timeout: seconds that a collective may take, and by which an iteration or a batch of an evaluation may exceed the longest one
    so far. graceful: SIGTERM and the like do not kill, see exits.py. owns_store: rank 0 holds the store, and not its
    launcher. pulse: to be written by the training loop.
    """

    def __init__(self, parallel: ParallelState, *, timeout: float, graceful: bool, owns_store: bool) -> None:
        self._rank, self._size, self.pulse = parallel.rank, parallel.world_size, Pulse()
        self._timeout, self._graceful, self._lingers = timeout, graceful, owns_store and self._rank == 0
        self._store_of = "rank 0" if owns_store else "torchrun on rank 0's node"
        self._verdict: Verdict | None = None
        self._main_ends = False
        self._asked = ""  # by the main thread: what its trouble is
        self._trouble: _Trouble | None = None
        self._store_failed_at: float | None = None
        self._beats = self._armed_at = 0
        self._left, self._answered = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self._size == 1:
            return self
        store = dist.distributed_c10d._get_default_store()
        self._store = store.clone() if hasattr(store, "clone") else store  # torch < 2.8: waits where the main thread does
        self._store.set_timeout(timedelta(seconds=STORE_S))
        self._beat()
        self._waking, self._wake = os.pipe()
        os.set_blocking(self._waking, False)
        os.set_blocking(self._wake, False)
        self._wakeup_before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        # Without it the SIGTERM that a launcher sends when a rank has died would come before the message.
        self._takes_term = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._takes_term:
            signal.signal(signal.SIGTERM, lambda *_: None)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is None:
            return
        self._left.set()
        os.write(self._wake, b"\0")
        self._thread.join(2 * STORE_S)
        faulthandler.cancel_dump_traceback_later()
        signal.set_wakeup_fd(self._wakeup_before)
        if self._takes_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self._thread.is_alive():
            os.close(self._waking)
            os.close(self._wake)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"beat/{self._rank}", LEFT)

    def explain(self, error: Exception) -> Verdict | None:
        """Why the run ends, where this rank does by `error`; None for a single rank. Writes the traceback of an error that tells
        more than the name of a rank. Takes about SILENT_S seconds where a collective failed."""
        if self._thread is None:
            return None
        self._main_ends = True
        words = str(error)
        late, lost = (isinstance(error, RuntimeError) and any(known in words for known in texts) for texts in (LATE, LOST))
        if late or not lost:
            traceback.print_exception(error)
        if not (late or lost):
            return self._told(Verdict(self._rank, 1, f"{type(error).__name__}: {words}"))
        self._asked = "late" if late else "lost"
        if not self._answered.wait(SILENT_S + 2 * STORE_S):
            return Verdict(self._rank, 1, f"{self._store_of} does not answer")
        return self._verdict

    def stop(self, stopped: StoppedEarly) -> Verdict:
        """Tells all ranks to stop as this one does. The verdict, which may be another rank's."""
        self._main_ends = True
        own = Verdict(self._rank, 128 + stopped.number, f"{stopped}: nothing was trained, nothing is saved")
        return own if self._thread is None else self._told(own)

    def is_first_to_say(self, text: str, *, after_others: bool) -> bool:
        """Whether no other rank has said yet why the run ends. All end with status 2. after_others: let them speak first."""
        self._main_ends = True
        if self._thread is None:
            return True
        if after_others and self._answered.wait(SILENT_S):
            return False
        verdict = self._told(Verdict(self._rank, 2, text))
        if self._lingers:
            time.sleep(3 * BEAT_S)  # the others must be able to read the verdict
        return verdict.rank == self._rank

    def leave(self, verdict: Verdict) -> NoReturn:
        """Ends the process here: the groups of a broken run cannot be left in an orderly way. Says why if no other rank has."""
        if threading.current_thread() is threading.main_thread():  # else the lock of a stream may be the main thread's
            sys.stdout.flush()
            sys.stderr.flush()
        if verdict.rank == self._rank:
            text = f"pretrain_gpt.py: [rank {self._rank}] stops at {self.pulse.where}: {verdict.text}\n"
            os.write(sys.stderr.fileno(), text.encode())
        if self._lingers and self._thread is not None:
            time.sleep(3 * BEAT_S)  # as above
        os._exit(verdict.status)

    # Below: the thread.

    def _run(self) -> None:
        while not self._left.is_set():
            ready, _, _ = select.select([self._waking], [], [], BEAT_S)
            for number in os.read(self._waking, 64) if ready else b"":
                if number not in (0, signal.SIGINT):
                    self._trouble = self._trouble or _Trouble("signal", number)
            try:
                self._look()
                self._store_failed_at = None
            except RuntimeError:  # of the store
                self._store_failed_at = self._store_failed_at or time.monotonic()
                if time.monotonic() - self._store_failed_at > SILENT_S:
                    self._verdict = Verdict(self._rank, 1, f"{self._store_of} is gone")
            if self._verdict is not None and not self._left.is_set():
                self._conclude(self._verdict)

    def _look(self) -> None:
        self._beat()
        self._arm()
        if self._store.check(["verdict"]):
            self._verdict = Verdict(*json.loads(self._store.get("verdict")))
            return
        left = self.pulse.seconds_left(self._timeout)
        what = self._asked or ("late" if left is not None and left < 0.0 else "")
        if what and (self._trouble is None or self._trouble.what == "signal"):
            self._trouble = _Trouble(what)
        if self._trouble is not None and self._trouble.before is None:
            self._trouble.before, self._trouble.since = self._all_beats(), time.monotonic()
        elif self._trouble is not None and time.monotonic() - self._trouble.since > SILENT_S:
            own = self._judge(self._trouble, self._all_beats())
            if own is None:
                self._trouble = None
            else:
                self._verdict = self._told(own)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._rank}", f"{self._beats} {self.pulse.moves} {self.pulse.where}")

    def _arm(self) -> None:
        """The timer for the case that this thread is held up, by a kernel that keeps Python's lock or by the store."""
        left, moves = self.pulse.seconds_left(self._timeout), self.pulse.moves
        if left is None:
            faulthandler.cancel_dump_traceback_later()
        elif moves != self._armed_at:
            faulthandler.dump_traceback_later(max(left, 0.0) + BACKSTOP_S, exit=True)
        self._armed_at = moves

    def _all_beats(self) -> dict[int, str]:
        """"" of a rank that has not begun."""
        keys = {rank: f"beat/{rank}" for rank in range(self._size) if rank != self._rank}
        return {rank: self._store.get(key).decode() if self._store.check([key]) else "" for rank, key in keys.items()}

    def _judge(self, trouble: _Trouble, beats: dict[int, str]) -> Verdict | None:
        """None where a signal is being seen to, and nobody is missing."""
        assert trouble.before is not None
        silent = [rank for rank, beat in beats.items() if beat == trouble.before[rank] != LEFT]
        gone = [rank for rank, beat in beats.items() if beat == LEFT]
        if trouble.what == "signal" and not silent:
            if self._graceful and self.pulse.where != START_UP:
                return None
            name = signal.Signals(trouble.number).name
            return Verdict(self._rank, 128 + trouble.number, f"{name}; no checkpoint is written")
        if trouble.what == "late":
            who = (_of(silent, "gives", "give") + " no sign of life" if silent else _of(gone, "has", "have") + " ended" if gone
                   else _slowest({self._rank: f"{self._beats} {self.pulse.moves} {self.pulse.where}", **beats}))
            return Verdict(self._rank, 1, f"no progress for more than {self._timeout:g} s: {who}", with_stacks=True)
        if silent:
            return Verdict(self._rank, 1, _of(silent, "is", "are") + " gone")
        if gone:
            return Verdict(self._rank, 1, _of(gone, "has", "have") + " ended, with a message")
        return Verdict(self._rank, 1, "a connection to another rank broke, though all are alive")

    def _told(self, own: Verdict) -> Verdict:
        """The verdict that counts, once this one is handed in."""
        try:
            self._store.compare_set("verdict", "", json.dumps(own))
            return Verdict(*json.loads(self._store.get("verdict")))
        except RuntimeError:  # the store is gone: this rank's own must do
            return own

    def _conclude(self, verdict: Verdict) -> None:
        """Ends the process, unless the main thread is about to: because it waits for the verdict, or since another rank ends."""
        if verdict.with_stacks:
            self._write_stacks()
        self._answered.set()
        if not self._left.wait(GRACE_S if self._main_ends or verdict.rank != self._rank else 0.0):
            self.leave(verdict)

    def _write_stacks(self) -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = f"[rank {self._rank}] stacks of all threads at {self.pulse.where}:\n{file.read()}"
        os.write(sys.stderr.fileno(), text.encode())


def _of(ranks: Sequence[int], one: str, several: str) -> str:
    """"rank 1 is", "ranks 1, 5 are"; at most eight are named."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown} {several}" if len(ranks) > 1 else f"rank {shown} {one}"


def _slowest(beats: dict[int, str]) -> str:
    """Who has moved least, of ranks that are all alive."""
    moves = {rank: int(beat.split(" ", 2)[1]) for rank, beat in beats.items() if beat}
    behind = [rank for rank in moves if moves[rank] == min(moves.values())]
    if len(behind) == len(beats):
        return "every rank is alive, and none is behind"
    return f"{_of(behind, 'is', 'are')} behind, at {beats[behind[0]].split(' ', 2)[2]}"
