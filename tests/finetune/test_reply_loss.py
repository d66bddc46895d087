"""The loss of reply tokens is torch's, with torch's gradients, in the memory of the logits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import Gemma2Config, Gemma2ForCausalLM

from panjue.finetune import reply_loss
from panjue.finetune.reply_loss import rows_at_once, token_losses


@settings(deadline=None)
@given(
    st.integers(0, 30),
    st.integers(2, 40),
    st.sampled_from([1, 50, 200, 2**22]),
    st.sampled_from([0.1, 1.0, 30.0]),
    st.integers(0, 9),
)
def test_losses_and_gradients_are_those_of_torch(
    tokens: int, vocabulary: int, at_once: int, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, 8, requires_grad=True)
    head = (scale * torch.randn(8, vocabulary)).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,))
    weights = torch.rand(tokens)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reply_loss, "LOGITS_AT_ONCE", at_once)
        for losses in (token_losses(hidden @ head, labels), torchs(hidden @ head, labels)):
            gradients = torch.autograd.grad((losses * weights).sum(), [hidden, head])
            found.append((losses.detach(), *gradients))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6 * max(1, scale))


def torchs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("largest", [30.0, 1000.0])
def test_the_loss_of_a_token_that_is_nearly_sure_is_no_rounding_error(largest: float) -> None:
    others = torch.full((1, 1000), largest - 18)
    others[0, 3] = largest
    exact = cross_entropy(others.double(), torch.tensor([3]))
    assert 1e-6 < exact < 1e-4
    [loss] = token_losses(others, torch.tensor([3]))
    torch.testing.assert_close(loss.double(), exact, rtol=2e-2, atol=0)


def test_a_label_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises((IndexError, RuntimeError), match=r"index|bounds"):
        token_losses(torch.zeros(2, 5), torch.tensor([0, 5]))


def test_the_gradient_is_in_the_memory_of_the_logits() -> None:
    logits = torch.randn(3, 7, requires_grad=True)
    held = logits * 1
    [gradient] = torch.autograd.grad(token_losses(held, torch.tensor([1, 2, 3])).sum(), [held])
    assert gradient.data_ptr() == held.data_ptr()
    torch.testing.assert_close(gradient.sum(1), torch.zeros(3), atol=1e-6, rtol=0)


def test_a_second_backward_pass_is_an_error_and_no_wrong_gradient() -> None:
    logits = torch.randn(3, 7, requires_grad=True)
    loss = token_losses(logits * 1, torch.tensor([1, 2, 3])).sum()
    torch.autograd.grad(loss, [logits], retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, [logits])


def test_logits_that_the_model_caps_have_torchs_gradients() -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "final_logit_softcapping": 3.0,
        "initializer_range": 0.5,
    }
    model = Gemma2ForCausalLM(Gemma2Config(**shape)).eval()
    ids = torch.randint(1, 50, (1, 12))
    found = []
    for losses_of in (token_losses, torchs):
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        gradients = torch.autograd.grad(losses_of(logits, ids[0, 1:]).sum(), [*model.parameters()])
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [2, 151_936, 2**23])
def test_a_part_has_at_least_one_token(vocabulary: int) -> None:
    rows = rows_at_once(torch.empty(1, vocabulary, device="meta"))
    assert rows >= 1
    assert rows == 1 or rows * vocabulary <= reply_loss.LOGITS_AT_ONCE
