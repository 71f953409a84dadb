"""A Slurm cluster of two nodes on this machine: `with Cluster(folder) as cluster:
cluster.submit(...)`.

As root, controller and nodes are namespaces of their own (network, host name, mounts; a node's
processes too), joined by a bridge inside the controller's, so that a node can lose its power and be
booted again. Otherwise two slurmd share the loopback interface, and their names lead nowhere.
Every daemon is killed with this process, however it ends: by PR_SET_PDEATHSIG, and a node's
processes with their namespace. (Only tasks on the loopback survive where this process is killed by
SIGKILL.)
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.support.limits import HANG_S
from tests.support.ports import free_port, free_ports

NODES = ("node1", "node2")
# for tests between networks (RFC 2544), and seen by nobody outside the namespaces
NET = "198.18.77"
NEEDED = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "unshare", "nsenter", "setpriv")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")

# A node's first process. Its processes are those of its namespace: they end with it.
NODE_INIT = """
hostname {name}; mount --bind {hosts} /etc/hosts; mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up
ip link add {link} type veth peer name eth0; ip addr add {address}/24 dev eth0; ip link set eth0 up
# The link of a node that was killed may still be there.
until ip link set {link} netns {controller}; do sleep 0.1; done
nsenter -t {controller} -n ip link set {link} master br0 up
exec unshare --pid --fork --kill-child --mount-proc \\
    bash -c 'slurmd -D & while :; do sleep 3600 & wait $!; done'
"""
CONTROLLER_INIT = """
hostname ctl; mount --bind {hosts} /etc/hosts; ip link set lo up
ip link add br0 type bridge; ip addr add {address}/24 dev br0; ip link set br0 up
touch {ready}; exec sleep infinity
"""

# cred_expire: a requeued job waits as long, by default two minutes. GraceTime: what a pre-empted
# job has for its checkpoint.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={controller}
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/%n.pid
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=6
MessageTimeout=5
TCPTimeout=2
KillWait=1
MinJobAge=3600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=node1,node2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=node1,node2 PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """Starts on entry, and on exit ends all that it started. Logs stay in `folder`."""

    def __init__(self, folder):
        self.folder = folder
        self.namespaces = can_use_namespaces()
        # Sockets have paths of at most 107 bytes, and munge wants a directory that no other user
        # can write.
        self._run = Path(tempfile.mkdtemp(prefix="slurm_", dir="/tmp"))
        self._run.chmod(0o755)
        self._processes = {}
        self._env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind, error, trace):
        if "slurmctld" in self._processes:
            # tasks on the loopback have no namespace to die with
            with contextlib.suppress(subprocess.SubprocessError):
                self.run("scancel", "--full", "--user", getpass.getuser(), check=False, timeout=10)
                until(lambda: not self.run("squeue", "--noheader", check=False, timeout=5), 10)
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()
        shutil.rmtree(self._run, ignore_errors=True)

    def run(self, *command, check=True, timeout=HANG_S, **variables):
        """The output of a command on the login node, which is the controller's."""
        done = subprocess.run(
            [*self._with_controller(), *command],
            env={**self._env, **variables},
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0 or not check, (
            f"{command}: status {done.returncode}\n{done.stderr}{done.stdout}"
        )
        return done.stdout.strip()

    def submit(self, *arguments, **variables):
        """The number of a new job: `sbatch *arguments`, with these variables."""
        meeting = (
            {} if self.namespaces else dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        )
        return int(self.run("sbatch", "--parsable", *arguments, **meeting, **variables))

    def job(self, number):
        """What scontrol knows of a job: JobState, Restarts, ExitCode, NodeList, ..."""
        words = self.run("scontrol", "show", "job", "--oneliner", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def kill_node(self, name):
        """Pulls the plug: all of the node's processes and its network are gone at once."""
        assert self.namespaces, "on the loopback a node is not something to be killed"
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def boot_node(self, name):
        """Starts a node, also one that was killed."""
        number, command = NODES.index(name) + 1, ("slurmd", "-D", "-N", name)
        if self.namespaces:
            script = NODE_INIT.format(
                name=name,
                hosts=self.folder / "hosts",
                link=f"v{number}",
                address=self._address(number),
                controller=self._processes["ctl"].pid,
            )
            command = (*["unshare", "-n", "-u", "-m", "bash", "-ec"], script)
        self._spawn(name, *command)

    def _start(self):
        if self.namespaces:
            hosts, ready = self.folder / "hosts", self._run / "ready"
            names = "".join(
                f"{self._address(number)} {name}\n" for number, name in enumerate(("ctl", *NODES))
            )
            hosts.write_text(f"127.0.0.1 localhost\n{names}")
            self._spawn(
                "ctl",
                *["unshare", "-n", "-u", "-m", "sh", "-ec"],
                CONTROLLER_INIT.format(hosts=hosts, address=self._address(0), ready=ready),
            )
            self._await(ready.exists)
        key, sock = self._run / "key", self._run / "munge.sock"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = [f"--{name}-file={self._run}/munge.{name}" for name in ("pid", "log", "seed")]
        flags = f"--foreground --key-file={key} --socket={sock} --num-threads=2"
        self._spawn("munged", "munged", *flags.split(), *files)
        self._await(sock.exists)
        (self.folder / "slurm.conf").write_text(self._configuration(sock))
        # as good as GPUs, to Slurm
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/tty[0-1]\n")
        (self._run / "state").mkdir()
        self._spawn("slurmctld", *self._with_controller(), "slurmctld", "-c", "-D")
        for name in NODES:
            self.boot_node(name)
        self._await(
            lambda: (
                self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).split()
                == ["idle"] * len(NODES)
            )
        )

    def _with_controller(self):
        """What runs a command where the controller is."""
        if not self.namespaces:
            return []
        pid = self._processes["ctl"].pid
        return [*f"nsenter -t {pid} -n -u -m".split(), f"--wd={os.getcwd()}", "--"]

    def _spawn(self, name, *command):
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*DIES_WITH_US, *command],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await(self, ready):
        def watched():
            for name, process in self._processes.items():
                assert process.poll() is None, (
                    f"{name} ended with status {process.returncode}:\n{self.logs()}"
                )
            return ready()

        assert until(watched, HANG_S), f"the cluster did not start:\n{self.logs()}"

    def logs(self):
        """The last lines of each daemon's log."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-12:])
            for path in sorted(self.folder.iterdir())
            if path.suffix in (".out", ".log")
        )

    def _configuration(self, munge_socket):
        host = "ctl" if self.namespaces else socket.gethostname().split(".")[0]
        ports = [6817, 6818, 6818] if self.namespaces else free_ports(3)
        nodes = [
            f"NodeName={name} NodeHostname={name if self.namespaces else host} "
            f"NodeAddr={self._address(number)} Port={port} "
            "CPUs=4 RealMemory=1000 Gres=gpu:2"
            for number, name, port in zip((1, 2), NODES, ports[1:], strict=True)
        ]
        return CONFIGURATION.format(
            controller=f"{host}({self._address(0)})",
            port=ports[0],
            user=getpass.getuser(),
            munge=munge_socket,
            run=self._run,
            logs=self.folder,
            nodes="\n".join(nodes),
        )

    def _address(self, number):
        """Of the controller (0) or of a node."""
        return f"{NET}.{10 + number}" if self.namespaces else "127.0.0.1"


def missing():
    """Programs of Slurm and of munge that are not installed here."""
    return [name for name in NEEDED if shutil.which(name, path=PATH) is None]


def can_use_namespaces():
    """Whether this process may make networks."""
    tried = (
        "unshare -n -u -m -p -f sh -c 'hostname there && ip link add br0 type bridge "
        "&& ip link add v1 type veth peer name eth0'"
    )
    return (
        os.geteuid() == 0
        and shutil.which("ip", path=PATH) is not None
        and subprocess.run(
            tried, shell=True, env={**os.environ, "PATH": PATH}, capture_output=True, check=False
        ).returncode
        == 0
    )


def until(true, seconds):
    """Whether it becomes true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)  # a look at the cluster takes two processes
    return True
