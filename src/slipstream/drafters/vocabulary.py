"""Which tokens a drafter's logits are about."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


class DraftVocabulary:
    """A drafter's columns of logits, as the target's tokens.

    Args:
        vocab_size: V, of the target.
        target_ids: the token of each column, [V_d] int64, ascending; None where column i is token
            i, and whatever lies past V is padding.
    """

    def __init__(self, vocab_size: int, target_ids: Tensor | None = None):
        self.vocab_size = vocab_size
        self._target_ids = target_ids
        # The token of each known column, int64.
        self.columns = np.arange(vocab_size) if target_ids is None else target_ids.numpy(force=True)

    def known(self, logits: Tensor) -> Tensor:
        """The columns that are tokens: [R, any] -> [R, at most V]."""
        return logits if self._target_ids is not None else logits[:, : self.vocab_size]

    def tokens(self, columns: np.ndarray) -> np.ndarray:
        """The tokens of columns."""
        return self.columns[columns]

    def widened(self, logits: Tensor) -> Tensor:
        """Logits [R, any] over all the target's tokens, [R, V]: those without are impossible."""
        known = self.known(logits)
        if self._target_ids is not None:
            out = logits.new_full((len(logits), self.vocab_size), -torch.inf)
            out[:, self._target_ids] = known
            return out
        missing = self.vocab_size - known.shape[1]
        return F.pad(known, (0, missing), value=-torch.inf) if missing else known
