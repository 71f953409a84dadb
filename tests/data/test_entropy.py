from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.tools import unigram_entropy as tool
from megatron_lite.tools.unigram_entropy import unigram_entropy
from tests.support.corpora import written


def test_blocks_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.RandomState(0).randint(0, 60, size=1000)
    # sorted: later blocks hold ids that the first ones lack
    prefix = written(tmp_path / "data", [np.sort(ids).tolist()])
    expected = -sum(
        (ids == token).mean() * math.log((ids == token).mean()) for token in set(ids.tolist())
    )
    monkeypatch.setattr(tool, "BLOCK", 37)
    assert unigram_entropy(prefix) == pytest.approx(expected, rel=1e-12)
