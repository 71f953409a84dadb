"""The settings of `--dry-run-memory`: which ranks of which world it measures."""

from collections.abc import Sequence

from .checks import parse_whole_number, quoted
from .parallel import ParallelConfig
from .setting import Settings, count, setting
from .stages import Stage

DEVICES = ("cpu", "cuda")
DRY_RUN = "dry_run_memory"


def _parse_ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_whole_number(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(
            f"--dry-run-ranks {quoted(text)}: {error}; give ranks such as 0,8,1023"
        ) from error


class DryRunConfig(Settings):
    """The settings of a dry run. They are no part of a run's configuration.

    dry_run_ranks: the global ranks; empty for one rank of each kind of pipeline rank.
    dry_run_world_size: the number of ranks. None: as many as the launcher started, or one replica
        of the model without a launcher.
    dry_run_device: "cpu" or "cuda"; None for the device that the run would use.
    """

    dry_run_ranks: tuple[int, ...] = setting(
        "global ranks of --dry-run-memory (default: one of each kind of pipeline rank)",
        (),
        parse=_parse_ranks,
        least=0,
        needs=DRY_RUN,
    )
    dry_run_world_size: int | None = count(
        "number of ranks of the run of --dry-run-memory (default: those that the launcher "
        "started, or those of one model)",
        needs=DRY_RUN,
    )
    dry_run_device: str | None = setting(
        "device of the run of --dry-run-memory (default: the one that the run would use); "
        "cuda cannot be simulated yet, and the report says so",
        choices=DEVICES,
        needs=DRY_RUN,
    )

    def check_rules(self) -> None:
        if len({*self.dry_run_ranks}) < len(self.dry_run_ranks):
            raise ValueError(
                f"--dry-run-ranks {','.join(map(str, self.dry_run_ranks))}: a rank is there more "
                "than once, leave one out"
            )

    def world_size(self, parallel: ParallelConfig, *, launched: int) -> int:
        """Returns the number of ranks of the simulated run.

        launched: the number of ranks that the launcher started; 1 without a launcher.
        ValueError: it is not a multiple of the ranks of one model.
        """
        one_model = parallel.model_ranks
        size = self.dry_run_world_size or (launched if launched > 1 else one_model)
        if size % one_model:
            raise ValueError(
                f"--dry-run-world-size {size} is not a multiple of {one_model}, the ranks of one "
                "model (tensor- x context- or experts' x pipeline-parallel): give a multiple"
            )
        return size

    def ranks(self, stages: Sequence[Stage], *, world_size: int) -> list[int]:
        """Returns the global ranks to measure. stages: those of the model.

        By default it is the first of each kind of pipeline rank, on tensor-, context- and
        data-parallel rank 0. Two pipeline ranks are of one kind if their stages have the same
        numbers of layers, and the embedding and the head too. Of ranks of one kind the first has
        the most micro-batches in flight.
        ValueError: a rank of --dry-run-ranks is not in the world.
        """
        if any(not 0 <= rank < world_size for rank in self.dry_run_ranks):
            raise ValueError(
                f"--dry-run-ranks {','.join(map(str, self.dry_run_ranks))}: a world of {world_size}"
                f" ranks has the ranks 0 to {world_size - 1}: give some of them, or a larger "
                "--dry-run-world-size"
            )
        if self.dry_run_ranks:
            return list(self.dry_run_ranks)
        size = len({stage.rank for stage in stages})
        kinds = [
            [(one.is_first, one.is_last, one.num_layers) for one in stages[rank::size]]
            for rank in range(size)
        ]
        return [first * (world_size // size) for first in sorted({*map(kinds.index, kinds)})]
