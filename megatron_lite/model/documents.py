"""The documents that a micro-batch packs into its sequences, as far as the model needs them.

A document begins at the start of a sequence and after each end-of-document token. The token that
ends a document belongs to it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Documents(NamedTuple):
    """The places of a micro-batch's documents. A field is None if its flag is not given.

    position_ids: [b, s/c] int64, the place of each of this rank's tokens within its document
        (--reset-position-ids).
    starts: [b, s] int64, for each token of the whole sequence the place of the first token of its
        document (--reset-attention-mask).
    """

    position_ids: Tensor | None = None
    starts: Tensor | None = None


NO_DOCUMENTS = Documents()
