from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    torch.set_num_threads(1)
    made = Cluster(3)
    yield made
    made.close()
