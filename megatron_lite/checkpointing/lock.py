"""The lock on the directory of --save: lock.json, which rank 0 holds for as long as the run lives.

The lock is a flock, which the system releases when the process ends in any way. The file's text
names the holder, and the number of its start in this directory. An earlier start of the same job
may be out of reach (a node that is cut off from the others). A later start then takes the lock by
putting a new file in its place. The earlier start calls `check` immediately before each change to
the directory. That call finds the new holder, and the earlier start stops.

A hanging file server can hold a process between its check and its change for any time. Therefore
the later start also removes the files that the earlier one could still rename (directory.py), and
readers compare the numbers of the starts that saved the steps (start.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from megatron_lite.config import checks
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import read_input
from megatron_lite.config.setting import from_plain
from megatron_lite.data.durable_files import sync

from .metadata import MOST_STARTS, Manifest

LOCK = "lock.json"
WITHOUT_NAME = "none"  # torchrun's id of a job that the user gave no id
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Errors by which a file system refuses locks.
NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK


class LockLost(InputError):
    """The error of a start whose lock another start has taken."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds the lock.

    job: Slurm's id of the job, or torchrun's id, or the token if there is neither.
    run: torchrun's id, and the address of its store, by which two torchruns with one id differ; ""
        without an id.
    requeues: how often Slurm has started the job again.
    restarts: how often torchrun has started the processes again since torchrun itself started.
    host, pid: the machine and the number of the process.
    token: a random text that identifies the process.
    start: the number of this start in the directory; the lock gives it.
    """

    job: str
    run: str
    requeues: int
    restarts: int
    host: str
    pid: int
    token: str
    start: int = 0

    @classmethod
    def this_process(cls) -> Holder:
        """Returns the holder for this process, from the environment of Slurm and torchrun.

        Without an id from either, the job's id is the random token, which no other job has.
        """
        token, run = secrets.token_hex(6), os.environ.get("TORCHELASTIC_RUN_ID", "")
        run, host = "" if run == WITHOUT_NAME else run, socket.gethostname()
        # torchrun keeps its store at one address while it starts the processes again. A loopback
        # address may be that of another torchrun on another host.
        address, port = (os.environ.get(f"MASTER_{what}", "") for what in ("ADDR", "PORT"))
        address = host if address in LOOPBACK else address
        names = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
        counts = (os.environ.get(name, "") for name in names)
        requeues, restarts = (int(count) if count.isdecimal() else 0 for count in counts)
        return cls(
            job=os.environ.get("SLURM_JOB_ID") or run or token,
            run=run and f"{run} {address}:{port}",
            requeues=requeues,
            restarts=restarts,
            host=host,
            pid=os.getpid(),
            token=token,
        )

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """Returns the holder that a file names; None if the file is missing or incomplete."""
        try:
            values = checks.parse_object(read_input(path, 2**16))
            others = values.keys() - {one.name for one in fields(cls)}
            holder = from_plain(cls, values, LOCK, others)
            checks.as_whole(holder.start, "start", 0, MOST_STARTS)
        except ValueError:
            return None
        return holder

    def was_requeued_after(self, other: Holder) -> bool:
        """Returns whether Slurm has started this one later than the other, for the same job."""
        return self.job == other.job and self.requeues > other.requeues

    def replaces(self, other: Holder) -> bool:
        """Returns whether this is a later start of the other's job, by Slurm or by torchrun.

        Slurm or torchrun has then given the other up for lost.
        """
        restarted = (
            self.job == other.job
            and self.requeues == other.requeues
            and "" != self.run == other.run
        )
        return self.was_requeued_after(other) or (restarted and self.restarts > other.restarts)

    def __str__(self) -> str:
        return f"job {self.job}, process {self.pid} on {self.host}"


class DirectoryLock:
    """The lock on the directory, from construction to `release`.

    token: of this process. The names of its temporary files contain it.
    holder: this process, with the number of this start: above those of the start that had the lock
    before, and of all steps, in case a person has removed lock.json.
    Raises InputError if another run holds the lock, or if a later start of this job has held it.
    """

    def __init__(self, root: Path, holder: Holder) -> None:
        starts = (Manifest.read_or_empty(path).start for path in root.glob("iter_*"))
        self.holder = replace(holder, start=max(starts, default=0) + 1)
        self.root, self.token, self._path = root, holder.token, root / LOCK
        self._file = self._take()

    def check(self) -> None:
        """Raises LockLost if another process has taken the lock.

        That is a later start of this job, or another run after a person had removed the file. If
        the file was removed and nobody has taken the lock since, it is taken again.
        """
        if not self._path.exists():
            before = self._file
            try:
                self._file = self._take()
            except InputError as refusal:  # somebody else took it after the look
                raise LockLost(str(refusal)) from refusal
            os.close(before)
        holder = Holder.read(self._path)
        if not holder or holder.token != self.token:
            raise LockLost(
                f"{self._path} is now held by {holder or 'another process'}: this one (process "
                f"{self.holder.pid} on {self.holder.host}) was given up for lost, and writes no "
                "more checkpoints"
            )

    def release(self) -> None:
        """Releases the lock for the next run. The file stays, because it names the last start."""
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _take(self) -> int:
        """Returns the open lock.json, once it is locked and names this process.

        Each round creates a locked file of this process, and renames it to lock.json. The file is
        created before the holder is read: a process that takes the lock after this point removes
        the file, the rename then fails, and the next round reads the new holder.
        """
        temporary = self._path.with_name(f"{LOCK}.{self.token}.tmp")
        while True:
            own, before = (os.open(path, FLAGS, 0o666) for path in (temporary, self._path))
            try:
                taken = [try_lock(one) for one in (own, before)]
                self.is_kept_by_system = None not in taken  # else this file system knows no locks
                free = taken[1] is not False
                # A lock on a file that is no longer lock.json is worth nothing: another process has
                # just replaced it, and the next round tries again.
                if not free or os.path.samestat(os.fstat(before), self._path.stat()):
                    other, place = Holder.read(self._path), f"--save {self.root}"
                    if other and other.was_requeued_after(self.holder):
                        raise InputError(
                            f"{place}: a later start of this job (requeued {other.requeues} times, "
                            f"this one {self.holder.requeues}) has had the directory: {other}"
                        )
                    if not (free or (other and self.holder.replaces(other))):
                        raise InputError(
                            f"{place} is in use by {other or 'another process'}: wait for its end, "
                            "or choose another directory (if that process cannot be reached any "
                            f"more, remove {self._path})"
                        )
                    start = max(self.holder.start, other.start + 1 if other else 0)
                    self.holder = replace(self.holder, start=min(start, MOST_STARTS))
                    text = json.dumps(asdict(self.holder), indent=1) + "\n"
                    with open(own, "w", closefd=False) as file:  # it writes the whole text
                        file.write(text)
                    sync(temporary)
                    # A flock belongs to the open file and not to its name, so the rename keeps it.
                    os.replace(temporary, self._path)
                    break
            except FileNotFoundError:
                pass  # another process took the lock at the same time and removed our file
            except BaseException:
                temporary.unlink(missing_ok=True)
                os.close(own)
                raise
            finally:
                os.close(before)
            os.close(own)
        sync(self.root)
        for path in self.root.glob(f"{LOCK}.*.tmp"):
            path.unlink(missing_ok=True)
        return own


def try_lock(descriptor: int) -> bool | None:
    """Returns whether this process now has the lock; None if the file system keeps no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True
