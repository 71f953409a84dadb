"""Watches over the ranks of a run.

If one rank is killed or hangs, all the other ranks end, and one message names it.

Each rank has a thread, the watch thread. Twice a second it writes a beat to the run's store and
looks for a verdict. A rank is in trouble if its collective failed or timed out, if it makes no
progress, or if a launcher sends it SIGTERM. It then reads the beats of every rank twice. A
rank whose beat has not changed is gone or stopped. The rank in trouble writes the verdict to the
store and prints it. The other ranks find the verdict and end without a message.

    key         value
    beat/RANK   BEATS MOVES WHERE, or "left". A wait for other ranks is half a move: MOVES is odd
    verdict     JSON; only the first one counts

The store belongs to rank 0, or to torchrun on rank 0's node. If the store is gone, every rank
prints its own message. The watch thread ends a process whose main thread does not react (in a
kernel, or in a collective that never gives up). If the watch thread is held up too, faulthandler's
timer ends the process.
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
from datetime import timedelta
from typing import NoReturn

from megatron_lite.config.checks import parse_json, printable
from megatron_lite.parallel.signals import die_of, flush_output
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import default_store

from .exits import LEFT, START_UP, Pulse, Trouble, Verdict, judge

BEAT_S = 0.5
SILENT_S = 2.5  # a rank without a new beat for this long counts as gone or stopped
GRACE_S = 5.0  # the time that the main thread has to end by itself after a verdict
BACKSTOP_S = 60.0  # faulthandler's timer fires this long after the limit of the watch
STORE_S = 10.0  # the limit for one request to the store
# Parts of the error texts by which a lost peer and a timeout are recognised.
LOST = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "pair closure",
    "NCCL remote",
    "remote process",
)
PACKAGE = __name__.partition(".")[0] + "."
# The modules that wait for other ranks (parallel/collectives.py), and this one.
WAITS = (__name__, PACKAGE + "parallel.collectives", PACKAGE + "pipeline.executor")
LATE = ("Timed out waiting", "timed out", "Watchdog caught collective operation timeout")


class Watch:
    """The watch over this rank: a context manager around everything after it has joined the run.

    Only the main thread may enter it. A run of one rank does not: it only calls `end`.

    timeout: limit in seconds for one collective. An iteration or a batch of an evaluation may take
    this long plus the longest one so far.
    graceful: whether SIGTERM and similar signals end the run in an orderly way (exits.py).
    owns_store: whether rank 0 holds the store, rather than its launcher.
    program: the name with which this rank's last message begins.
    pulse: where this rank is. The training loop writes it.
    """

    def __init__(
        self,
        parallel: ParallelState,
        pulse: Pulse,
        *,
        timeout: float,
        graceful: bool,
        owns_store: bool,
        program: str,
    ) -> None:
        self._program = program
        self._rank, self._size, self.pulse = parallel.rank, parallel.world_size, pulse
        self._timeout = timeout
        self._graceful = graceful
        self._lingers = owns_store and self._rank == 0
        self._store_of = "rank 0" if owns_store else "torchrun on rank 0's node"
        self._verdict: Verdict | None = None
        self._main_ends = False
        self._asked = ""  # the trouble that the main thread reports to the watch thread
        self._trouble: Trouble | None = None
        self._store_failed_at: float | None = None
        self._beats = 0
        self._left, self._answered = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        self._store = default_store().clone()  # a connection of its own
        self._store.set_timeout(timedelta(seconds=STORE_S))
        self._beat()
        self._waking, self._wake = os.pipe()
        os.set_blocking(self._waking, False)
        os.set_blocking(self._wake, False)
        self._wakeup_before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        # A launcher sends SIGTERM to the other ranks when one has died. Without a handler it would
        # kill this rank before it could write its message.
        self._takes_term = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._takes_term:
            signal.signal(signal.SIGTERM, self._pause)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._left.set()
        os.write(self._wake, b"\0")
        self._thread.join(2 * STORE_S)
        faulthandler.cancel_dump_traceback_later()
        signal.set_wakeup_fd(self._wakeup_before)
        # Exits.finish may have set SIG_IGN; that stays.
        if self._takes_term and signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self._thread.is_alive():
            os.close(self._waking)
            os.close(self._wake)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"beat/{self._rank}", LEFT)

    def _pause(self, *_: object) -> None:
        """Holds the main thread at a signal, which must neither train nor save any more."""
        while not (self._main_ends or self._left.is_set()):
            time.sleep(BEAT_S)

    def explain(self, error: Exception) -> Verdict:
        """Returns why the run ends, when `error` ends this rank.

        Prints the traceback, except that of a lost connection, which adds nothing to the name of
        the rank. If a collective failed, the call takes about SILENT_S seconds.
        """
        self._main_ends = True
        words = str(error)
        late, lost = (
            isinstance(error, RuntimeError) and any(known in words for known in texts)
            for texts in (LATE, LOST)
        )
        if late or not lost:
            traceback.print_exception(error)
        if not (late or lost):
            return self._told(Verdict(self._rank, 1, f"{type(error).__name__}: {words}"))
        self._asked = "late" if late else "lost"
        if not self._answered.wait(SILENT_S + 2 * STORE_S):
            return Verdict(self._rank, 1, f"{self._store_of} does not answer")
        assert self._verdict is not None
        return self._verdict

    def end(self, own: Verdict) -> NoReturn:
        """Ends the process by this rank's verdict, or by another rank's that came first.

        Ctrl-C, for example, reaches all ranks. A second one must not interrupt the end.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._main_ends = True
        self.leave(own if self._thread is None else self._told(own))

    def is_first_to_say(self, text: str, *, after_others: bool) -> bool:
        """Returns whether this rank is the first to report why the run ends.

        All ranks end with status 2.
        after_others: gives the other ranks SILENT_S seconds to report first.
        """
        self._main_ends = True
        if after_others and self._answered.wait(SILENT_S):
            return False
        verdict = self._told(Verdict(self._rank, 2, text))
        if self._lingers:
            # The store ends with this process. The other ranks must read the verdict first.
            time.sleep(3 * BEAT_S)
        return verdict.rank == self._rank

    def leave(self, verdict: Verdict) -> NoReturn:
        """Ends the process here, and prints the verdict if it is this rank's own.

        The process groups of a broken run cannot be left in an orderly way.
        """
        on_main = threading.current_thread() is threading.main_thread()
        # In the watch thread a flush could wait for a lock that the main thread holds.
        if on_main:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            flush_output()
        if verdict.rank == self._rank:
            text = (
                f"{self._program}: [rank {self._rank}] stops at {self.pulse.where}: {verdict.text}"
            )
            if self.pulse.saved:
                text += f"; the newest checkpoint is {self.pulse.saved}"
            with contextlib.suppress(OSError):  # standard error is full or closed
                os.write(sys.stderr.fileno(), f"{printable(text)}\n".encode())
        if self._lingers and self._thread is not None:
            time.sleep(3 * BEAT_S)  # the others must read the verdict first
        # A shell script stops at Ctrl-C only if its command dies of the signal itself.
        if on_main and verdict.status == 128 + signal.SIGINT:
            die_of(signal.SIGINT)
        os._exit(verdict.status)

    # The methods below run in the watch thread.

    def _run(self) -> None:
        # select.select fails for descriptors from 1024 on.
        poll = select.poll()
        poll.register(self._waking, select.POLLIN)
        while not self._left.is_set():
            ready = poll.poll(BEAT_S * 1000.0)
            # Each byte in the pipe is the number of a signal; __exit__ writes 0 to wake the thread.
            for number in os.read(self._waking, 64) if ready else b"":
                if number:
                    self._trouble = self._trouble or Trouble("signal", number)
            try:
                self._look()
                self._store_failed_at = None
            except RuntimeError:  # raised by the store
                self._store_failed_at = self._store_failed_at or time.monotonic()
                if time.monotonic() - self._store_failed_at > SILENT_S:
                    self._verdict = Verdict(self._rank, 1, f"{self._store_of} is gone")
            if self._verdict is not None and not self._left.is_set():
                self._conclude(self._verdict)

    def _look(self) -> None:
        self._beat()
        self._arm()
        if self._store.check(["verdict"]):
            self._verdict = Verdict(*parse_json(self._store.get("verdict")))
            return
        # A failure replaces a signal that came first: the launcher may have sent the signal
        # because of that failure, which the message must name.
        left = self.pulse.seconds_left(self._timeout)
        what = self._asked or ("late" if left is not None and left < 0.0 else "")
        if what and (self._trouble is None or self._trouble.what == "signal"):
            self._trouble = Trouble(what)
        # Trouble takes two readings of the beats, SILENT_S seconds apart, then a verdict.
        if self._trouble is not None and not self._trouble.before:
            self._trouble.before, self._trouble.since = self._all_beats(), time.monotonic()
        elif self._trouble is not None and time.monotonic() - self._trouble.since > SILENT_S:
            own = judge(
                self._trouble,
                self._all_beats(),
                self._rank,
                timeout=self._timeout,
                graceful=self._graceful and self.pulse.where != START_UP,
            )
            if own is None:
                self._trouble = None
            else:
                self._verdict = self._told(own)

    def _beat(self) -> None:
        self._beats += 1
        beat = f"{self._beats} {2 * self.pulse.moves + _waits()} {self.pulse.where}"
        self._store.set(f"beat/{self._rank}", beat)

    def _arm(self) -> None:
        """Sets faulthandler's timer, which ends the process if the watch thread itself is held up.

        A kernel that keeps Python's global lock can hold it up, and so can the store. Each look
        sets the timer anew; a stretch without a limit has no timer.
        """
        left = self.pulse.seconds_left(self._timeout)
        if left is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(max(left, 0.0) + BACKSTOP_S, exit=True)

    def _all_beats(self) -> dict[int, str]:
        """Returns the last beat of every rank, by rank; "" if a rank has written none yet."""
        keys = {rank: f"beat/{rank}" for rank in range(self._size)}
        return {
            rank: self._store.get(key).decode() if self._store.check([key]) else ""
            for rank, key in keys.items()
        }

    def _told(self, own: Verdict) -> Verdict:
        """Hands in this rank's verdict and returns the one that counts, which is the first."""
        try:
            self._store.compare_set("verdict", "", json.dumps(own))
            return Verdict(*parse_json(self._store.get("verdict")))
        except RuntimeError:  # the store is gone, and with it the verdicts of other ranks
            return own

    def _conclude(self, verdict: Verdict) -> None:
        """Ends the process, after a grace period if the main thread is about to end it.

        The main thread is about to end it if it waits for this verdict. It probably is, too, if the
        verdict is another rank's, unless by a signal: the end of that rank breaks its collectives.
        """
        if verdict.with_stacks:
            # On a full disk the process ends without them.
            with contextlib.suppress(OSError), tempfile.TemporaryFile("w+") as file:
                faulthandler.dump_traceback(file, all_threads=True)
                file.seek(0)
                stacks = f"stacks of all threads at {self.pulse.where}:\n{file.read()}"
                os.write(sys.stderr.fileno(), f"[rank {self._rank}] {stacks}".encode())
        self._answered.set()
        is_told = verdict.rank == self._rank or verdict.status > 128
        if not self._left.wait(GRACE_S if self._main_ends or not is_told else 0.0):
            self.leave(verdict)


def _waits() -> bool:
    """Returns whether the main thread waits for other ranks, or says that it did in vain."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and not (name := frame.f_globals.get("__name__", "")).startswith(PACKAGE):
        frame = frame.f_back
    return frame is not None and name in WAITS
