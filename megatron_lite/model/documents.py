"""The documents that a micro-batch packs into its sequences, as far as the model needs them.

A document begins at the start of a sequence and after each end-of-document token. The token that
ends a document belongs to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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


def document_mask(query: Tensor, starts: Tensor, reach: int | None = None) -> Tensor:
    """Returns [b, 1, s, s] in the query's dtype: 0 for the keys that a query reads, else -inf.

    The mask is added to scores. Query i of a sample reads the keys from the start of its document,
    and with `reach` at most from i - reach, up to i. query: [s, ..]. starts: [b, s].
    """
    length, samples = query.shape[0], starts.shape[0]
    places = torch.arange(length, device=query.device)
    first = starts if reach is None else starts.maximum(places - reach)
    earlier = places < first.unsqueeze(-1)  # [b, s, s]
    mask = query.new_full((samples, length, length), -torch.inf).triu_(1)
    return mask.masked_fill_(earlier, -torch.inf).unsqueeze(1)
