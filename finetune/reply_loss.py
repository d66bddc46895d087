"""The loss of reply tokens, in little more memory than that of their logits.

Of a vocabulary of 152,000, the logits of a thousand tokens have 600 MB. torch's `cross_entropy`
makes a second matrix of that size, of logarithms of probabilities, and two more for the gradient.
Here the gradient is written into the logits, as kernels for GPUs do it (Liger, Unsloth).
"""

from typing import Any

import torch
from torch import Tensor

LOGITS_AT_ONCE = 2**22
"""16 MB: a part stays in the cache of a processor, and in memory that malloc uses again."""


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each token, [tokens]; `labels` has its class.

    `logits`, float32, [tokens, vocabulary], hold the gradient after a backward pass: there can be
    one only, and the operation that made them may not need them. torch raises an error if it does,
    but not with `activation_offloading`.
    """
    losses: Tensor = _TokenLosses.apply(logits, labels)  # type: ignore[no-untyped-call]
    return losses


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        peaks = logits.amax(1, keepdim=True)
        parts = zip(
            *(torch.split(one, rows_at_once(logits)) for one in (logits, peaks)), strict=True
        )
        log_sums = torch.cat([(part - peak).logsumexp(1, keepdim=True) for part, peak in parts])
        context.save_for_backward(logits, labels, peaks, log_sums)
        # Above the peak, where float32 is fine enough for losses near 0.
        return (log_sums - (logits.gather(1, labels[:, None]) - peaks))[:, 0]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, labels, peaks, log_sums = context.saved_tensors
        [gradient] = gradients
        rows = rows_at_once(logits)
        of_parts = (torch.split(one, rows) for one in (logits, labels, peaks, log_sums, gradient))
        for part, label, peak, log_sum, weight in zip(*of_parts, strict=True):
            # Of a loss it is the probabilities, less one for the label.
            part.sub_(peak).sub_(log_sum).exp_()
            part.scatter_add_(1, label[:, None], part.new_full((len(part), 1), -1))
            part.mul_(weight[:, None])
        return logits, None


def rows_at_once(logits: Tensor) -> int:
    """Return of how many tokens there are `LOGITS_AT_ONCE`."""
    return max(1, LOGITS_AT_ONCE // logits.shape[1])
