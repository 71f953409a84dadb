"""The fullest moment of a pipeline rank's actions, each of them a passage.

    held when an action begins    what earlier actions have left, the tensors that have arrived for
                                  this action and for the next one, and tensors that are being sent
    held at the fullest moment    that, and the most of the action's passage

How long a send takes depends on the other rank. Here the tensor of the action before is still being
sent. With virtual stages those of three actions are, except on the last rank, for which the others
wait. Standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_lite.config.stages import Stage
from megatron_lite.memory.predict.passages import Moment, Passage
from megatron_lite.pipeline.order import Action


class Fullest(NamedTuple):
    """The fullest moment of a step.

    num_bytes: all bytes beyond those that are held between steps.
    kept: the bytes kept for backward by all micro-batches in flight. rebuilt: those of a replay.
    arrived: the bytes of a tensor that has arrived for the next action. sent: those of a tensor
        that may still be on its way.
    """

    action: Action
    moment: Moment
    num_bytes: int
    kept: int
    arrived: int = 0
    sent: int = 0

    @property
    def rebuilt(self) -> int:
        """The bytes that a replay has rebuilt."""
        return self.moment.rebuilt


def fullest(
    actions: Sequence[Action],
    passage_of: Callable[[Action], Passage],
    stages: Sequence[Stage],
    *,
    hidden_bytes: int,
    overlap: bool,
) -> Fullest:
    """Returns the fullest moment of a rank's actions.

    stages: the rank's stages, by model chunk.
    hidden_bytes: the bytes of a tensor between two stages.
    overlap: whether the input of an action arrives while the action before it runs.
    """

    def receives(action: Action) -> bool:
        stage = stages[action.chunk]
        return not (stage.is_first if action.kind == "forward" else stage.is_last)

    def sends(action: Action) -> bool:
        stage = stages[action.chunk]
        return not (stage.is_last if action.kind == "forward" else stage.is_first)

    held = kept = 0
    under_way = deque([0], maxlen=1 if len(stages) == 1 or stages[-1].is_last else 3)
    found: Fullest | None = None
    for number, action in enumerate(actions):
        passage = passage_of(action)
        following = actions[number + 1] if overlap and number + 1 < len(actions) else None
        arrived = hidden_bytes if following is not None and receives(following) else 0
        # The action's own input arrived before, and belongs to its passage from now on.
        held += hidden_bytes if receives(action) else 0
        sent = sum(under_way)
        num_bytes = held + arrived + sent + passage.fullest.num_bytes
        if found is None or num_bytes > found.num_bytes:
            found = Fullest(
                action, passage.fullest, num_bytes, kept + passage.fullest.kept, arrived, sent
            )
        # A passage ends without the tensor that the action sends. The tensor is counted here as
        # long as it may be on its way.
        held += passage.end
        kept += passage.kept
        under_way.append(hidden_bytes if sends(action) else 0)
    assert found is not None, "a step has actions"
    return found
