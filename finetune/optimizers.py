"""Optimizers: LoRA+, and the check that one can be made before anything slow begins."""

from copy import copy

import torch
from peft.optimizers import create_loraplus_optimizer
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.training_args import OptimizerNames

OWN_GROUPS = {"params", "model", "optimizer_dict"}
"""Arguments with which an optimizer (GaLore, LOMO, layerwise ones) groups the weights itself."""


def check_optimizer(trainer: Trainer, lr_ratio: float | None) -> None:
    """Try the settings of optimizer and scheduler now, so that a dry run finds errors.

    Raises:
        ImportError, ValueError, TypeError: A package is missing, or the optimizer or scheduler
            does not accept its arguments.
    """
    args = trainer.args
    plain = copy(args)  # layerwise optimizers would attach hooks to the model's weights here
    plain.optim = OptimizerNames(args.optim.removesuffix("_layerwise"))
    if lr_ratio:
        lora_plus(trainer.model, plain, lr_ratio)
    else:
        trainer.get_optimizer_cls_and_kwargs(plain, trainer.model)
    get_scheduler(
        args.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate),
        num_warmup_steps=0,
        num_training_steps=1,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )


def lora_plus(model: torch.nn.Module, args: TrainingArguments, lr_ratio: float) -> Optimizer:
    """Return an optimizer with a learning rate `lr_ratio` times as high for B (arXiv:2402.12354).

    In peft's version weights of one dimension (norms, DoRA's magnitudes) have that rate too.

    Raises:
        ValueError: The optimizer of `args` groups the weights itself.
    """
    optimizer, words = Trainer.get_optimizer_cls_and_kwargs(args, model)
    if OWN_GROUPS & words.keys():
        raise ValueError(
            f"loraplus_lr_ratio does not go with optim={OptimizerNames(args.optim).value}, which "
            "groups the weights itself; set trainer.optim=adamw_torch"
        )
    made: Optimizer = create_loraplus_optimizer(
        model,
        optimizer,
        loraplus_lr_ratio=lr_ratio,
        loraplus_lr_embedding=args.learning_rate,  # else 1e-6, whatever the rate
        loraplus_weight_decay=args.weight_decay,
        **words,
    )
    # torch cannot load an FSDP2 checkpoint of an optimizer with two empty groups.
    made.param_groups = [group for group in made.param_groups if group["params"]]
    return made
