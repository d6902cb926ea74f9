"""A session: the compacted cache of a request that has ended, for its next turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, eq=False)
class StoredSession:
    """What one rank keeps of a session.

    Attributes
    ----------
    key : str
        Names the session together with everything that must not be mixed up: model, tenant,
        adapter. Letters and digits.
    settings : str
        Policy, window and options it was compacted under; only a request with the same resumes it.
    tokens : numpy array
        int32: ids of all its tokens; the last ones may have no keys yet.
    computed : int
        How many of them have keys, or had keys before they were evicted (the logical length).
    keys, values : torch.Tensor
        [layers, held tokens, kv heads, head size], as the cache held them.
    state : bytes
        The evictor's: positions, query buffers, attention sums, phases.
    """

    key: str
    settings: str
    tokens: npt.NDArray[np.int32]
    computed: int
    keys: torch.Tensor
    values: torch.Tensor
    state: bytes

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.keys.nbytes + self.values.nbytes + len(self.state) + self.tokens.nbytes
