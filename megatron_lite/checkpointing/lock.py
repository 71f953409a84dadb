"""lock.json in the directory of --save: which run writes there. Held by rank 0 for as long as the run lives.

The lock is a flock, which ends with the process, however it ends. The text says whose it is, and which start of its job. A later
start takes the lock from an earlier one that cannot be reached any more (a node cut off from the others), by putting a new file
in its place. The earlier one finds out before it publishes anything, and stops.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_lite.checkpointing.files import read_bounded
from megatron_lite.config.checks import InputError

LOCK = "lock.json"
WITHOUT_NAME = "none"  # torchrun's id of a job that was given none
NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds the lock. job: Slurm's id, else torchrun's. run: torchrun's, "" without. requeues: how often Slurm started the
    job again. restarts: the same of torchrun, since it was started itself. token: of this process."""

    job: str
    run: str
    requeues: int
    restarts: int
    host: str
    pid: int
    token: str

    @classmethod
    def this_process(cls, environ: Mapping[str, str] | None = None) -> Holder:
        """Of a job that Slurm or torchrun knows by an id; else of one that is like no other."""
        env = os.environ if environ is None else environ
        token = secrets.token_hex(6)
        run = env.get("TORCHELASTIC_RUN_ID", "")
        run = "" if run == WITHOUT_NAME else run
        counts = [env.get(name, "") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
        requeues, restarts = (int(count) if count.isdecimal() else 0 for count in counts)
        return cls(job=env.get("SLURM_JOB_ID") or run or token, run=run, requeues=requeues, restarts=restarts,
                   host=socket.gethostname(), pid=os.getpid(), token=token)

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """None where there is no file, or no whole one."""
        try:
            values = json.loads(read_bounded(path, 2**16))
            return cls(job=str(values["job"]), run=str(values["run"]), requeues=int(values["requeues"]),
                       restarts=int(values["restarts"]), host=str(values["host"]), pid=int(values["pid"]),
                       token=str(values["token"]))
        except (KeyError, TypeError, ValueError, RecursionError):
            return None

    def was_requeued_after(self, other: Holder) -> bool:
        """Whether this is a later start, by Slurm, of the other's job."""
        return self.job == other.job and self.requeues > other.requeues

    def replaces(self, other: Holder) -> bool:
        """Whether whoever started this one has given the other up for lost."""
        restarted = self.job == other.job and self.requeues == other.requeues and "" != self.run == other.run
        return self.was_requeued_after(other) or (restarted and self.restarts > other.restarts)

    def __str__(self) -> str:
        return f"job {self.job}, process {self.pid} on {self.host}"


class DirectoryLock:
    """Taken when made, until `release`. InputError where another run holds it, or a later start of this job has held it."""

    def __init__(self, root: Path, holder: Holder) -> None:
        self.holder, self._path = holder, root / LOCK
        self.is_kept_by_system = True  # False: this file system knows no locks
        while True:
            before = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                free = self._try_lock(before)
                if free and not _is(before, self._path):
                    continue  # another process has just replaced it
                self._check_may_take(Holder.read(self._path), free=free)
                self._file = self._replace()
                return
            finally:
                os.close(before)

    @property
    def token(self) -> str:
        """Of this process: part of the names of its temporary files."""
        return self.holder.token

    def check(self) -> None:
        """InputError where a later start of this job, or whoever removed the file, has taken the lock."""
        if not self._path.exists():
            before, self._file = self._file, self._replace()
            os.close(before)
            return
        holder = Holder.read(self._path)
        if holder is None or holder.token != self.token:
            raise InputError(f"{self._path} is now held by {holder or 'another process'}: this one (process {self.holder.pid} on "
                             f"{self.holder.host}) was given up for lost, and writes no more checkpoints")

    def release(self) -> None:
        """Lets the next run in. The file stays, to say which start came last."""
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _check_may_take(self, other: Holder | None, *, free: bool) -> None:
        if other is not None and other.was_requeued_after(self.holder):
            raise InputError(f"--save {self._path.parent}: a later start of this job (requeued {other.requeues} times, this one "
                             f"{self.holder.requeues}) has had the directory: {other}")
        if free or (other is not None and self.holder.replaces(other)):
            return
        raise InputError(f"--save {self._path.parent} is in use by {other or 'another process'}: wait for its end, or choose "
                         f"another directory (if that process cannot be reached any more, remove {self._path})")

    def _try_lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.is_kept_by_system = False
        return True

    def _replace(self) -> int:
        """A locked file of ours in the place of whatever stands there."""
        temporary = self._path.with_name(f"{LOCK}.{self.token}.tmp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            self._try_lock(descriptor)
            os.write(descriptor, (json.dumps(asdict(self.holder), indent=1) + "\n").encode())
            os.fsync(descriptor)
            os.replace(temporary, self._path)
        except OSError:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        return descriptor


def _is(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one of this name."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
