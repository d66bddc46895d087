"""The loss of reply tokens, computed in little more memory than their logits take.

With a vocabulary of 152,000, the logits of a thousand tokens take 600 MB. torch's `cross_entropy`
makes a second matrix of that size for log probabilities, and two more for the gradient. Here the
gradient is written into the logits, as GPU kernels do (Liger, Unsloth).
"""

from typing import Any

import torch
from torch import Tensor

LOGITS_AT_ONCE = 2**22
"""Logits of one part, 16 MB. A part stays in the processor's cache, and malloc reuses its
memory."""


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each token, [tokens]; `labels` has its class.

    After a backward pass, `logits`, float32, [tokens, vocabulary], contain the gradient. So there
    can be only one backward pass. The operation that made the logits must not use them in its own
    backward pass. torch raises an error if it does, but not with `activation_offloading`.
    """
    losses: Tensor = _TokenLosses.apply(logits, labels)  # type: ignore[no-untyped-call]
    return losses


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log(sum(exp(logits))) minus the logit of the label, for each token."""
        peaks = logits.amax(1, keepdim=True)
        parts = zip(
            *(torch.split(one, rows_at_once(logits)) for one in (logits, peaks)), strict=True
        )
        log_sums = torch.cat([(part - peak).logsumexp(1, keepdim=True) for part, peak in parts])
        context.save_for_backward(logits, labels, peaks, log_sums)
        # Relative to the peak, where float32 is precise enough for losses near 0.
        return (log_sums - (logits.gather(1, labels[:, None]) - peaks))[:, 0]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Write the gradient of the logits into them, and return it; labels have none."""
        logits, labels, peaks, log_sums = context.saved_tensors
        [gradient] = gradients
        rows = rows_at_once(logits)
        of_parts = (torch.split(one, rows) for one in (logits, labels, peaks, log_sums, gradient))
        for part, label, peak, log_sum, weight in zip(*of_parts, strict=True):
            # The gradient of a loss is the probabilities, minus one at the label.
            part.sub_(peak).sub_(log_sum).exp_()
            part.scatter_add_(1, label[:, None], part.new_full((len(part), 1), -1))
            part.mul_(weight[:, None])
        return logits, None


def rows_at_once(logits: Tensor) -> int:
    """Return how many tokens have about `LOGITS_AT_ONCE` logits together, at least 1."""
    return max(1, LOGITS_AT_ONCE // logits.shape[1])
