"""The files of a checkpoint directory. A kill leaves either the old state or the new one.

    DIR/latest_checkpointed_iteration.txt      "40", replaced only once iter_0000040 is complete
    DIR/lock.json                              who writes here (lock.py)
    DIR/iter_0000040/config.json               the RunConfig
                     metadata.json             progress, the sizes of the parallel axes, the
                                               identity of the data
                     parameters_pp00.json      global shape and split of each parameter of a
                                               pipeline rank
                     model_pp00_tp00of02.safetensors        one rank's shards, by parameter name,
                                                            without vocabulary padding
                     optimizer_pp00_tp00of02.safetensors    NAME/STATE by the update rule
                                                            (NAME/exp_avg ..), NAME/master
                     rng_00000.safetensors     random-number streams, one file per rank
                     tokenizer.json ..         the tokenizer's files (data/tokenizer_files.py)
                     manifest.json             size and SHA-256 of each of these files; written last

A start writes a step into iter_0000040.tmp-TOKEN, syncs it, and renames it. TOKEN is different for
every start. A tensor that all TP ranks hold alike is in the file of TP rank 0 only. A tied
embedding is in the file of the first pipeline rank only. These other names are not steps:

    iter_N.tmp-TOKEN, latest_..txt.tmp-TOKEN    unfinished; the next start removes them
    iter_N.deleted-TOKEN                        about to be deleted; the next start removes it
    iter_N.superseded, iter_N.superseded2 ..    a step that does not lead to the newest one, because
                                                the run went on from an earlier step; readers ignore
                                                it
    iter_N.old                                  a step that the same iteration's next one replaces.
                                                After a kill in between, readers take it where there
                                                is no iter_N, and the next start gives it its name
                                                back, unless iter_N is complete
"""

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.config import checks

LATEST = "latest_checkpointed_iteration.txt"
CONFIG, METADATA = "config.json", "metadata.json"
MOST_ITERATIONS = 10**9 - 1  # the longest name of a step has nine digits
MOST_SAMPLES = 2**62
STEP_NAME = re.compile(r"iter_(\d{7,9})")
SUPERSEDED = re.compile(r"iter_(\d{7,9})\.superseded\d*")
UNFINISHED = re.compile(r"(iter_\d{7,9}|" + re.escape(LATEST) + r")\.tmp(-\w+)?")
CONDEMNED = re.compile(r"iter_\d{7,9}\.deleted(-\w+)?")
REPLACED = re.compile(r"iter_(\d{7,9})\.old")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run.

    iteration: how many iterations are done.
    consumed_samples: how many samples they have read.
    skipped_iterations: how many of them changed no weight.
    nan_iterations: how many of them had a NaN loss.
    evaluation_is_due: whether the run stopped before or in the evaluation after this iteration.
    skipped_in_a_row: how many of the last iterations in a row changed no weight. The overflows of
    a float16 run do not count.
    """

    iteration: int
    consumed_samples: int
    skipped_iterations: int = 0
    nan_iterations: int = 0
    evaluation_is_due: bool = False
    skipped_in_a_row: int = 0

    def check(self) -> None:
        """Raises ValueError on numbers that no run has."""
        checks.as_whole(self.iteration, "iteration", 0, MOST_ITERATIONS)
        checks.as_whole(self.consumed_samples, "consumed_samples", 0, MOST_SAMPLES)
        for name in ("skipped_iterations", "nan_iterations", "skipped_in_a_row"):
            checks.as_whole(getattr(self, name), name, 0, self.iteration)


NO_PROGRESS = Progress(iteration=0, consumed_samples=0)


def step_directory(root: Path, iteration: int) -> Path:
    """Returns the path of an iteration's checkpoint."""
    return root / f"iter_{iteration:07d}"


def shard_file(kind: str, pp_rank: int, tp_rank: int, tp_size: int) -> str:
    """Returns the file name of one rank's tensors.

    kind: "model" or "optimizer".
    pp_rank, tp_rank: the pipeline rank and the TP rank that hold the tensors.
    """
    return f"{kind}_pp{pp_rank:02d}_tp{tp_rank:02d}of{tp_size:02d}.safetensors"


def parameters_file(pp_rank: int) -> str:
    """Returns the file name of the parameters' layouts of one pipeline rank."""
    return f"parameters_pp{pp_rank:02d}.json"


def rng_file(rank: int) -> str:
    """Returns the file name of one rank's random-number streams."""
    return f"rng_{rank:05d}.safetensors"


def saved_steps(root: Path) -> list[int]:
    """Returns the iterations of all steps under `root`, good or damaged, in ascending order."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    found = (STEP_NAME.fullmatch(name) or REPLACED.fullmatch(name) for name in names)
    return sorted({int(name[1]) for name in found if name})


def saved_step(root: Path, iteration: int) -> Path:
    """Returns the folder of a saved step: iter_N.old if that is there alone."""
    step = step_directory(root, iteration)
    replaced = step.with_suffix(".old")
    return replaced if replaced.is_dir() and not step.exists() else step
