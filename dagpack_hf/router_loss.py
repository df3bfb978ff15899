"""The load-balancing loss of mixtures of experts, as ordinary training computes it.

It is a function of two means over the tokens of a batch: which experts they are sent to, and how likely each expert
was. On packed rows each mean is taken with the number of sequences that a position stands for, so that a shared token
counts as often as it would unpacked, and a repeated one not again; then it is the same loss.

That number is not that of the targets: context has none, and is sent to experts as often. It is a vector of the row
(`sequence_counts` counts it). Where it is not known the loss is off, which is said.

Cost: 4 bytes for each position of a row; the router's logits, which the model's own loss keeps too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import SFTConfig

from dagpack_hf.attention import route_of
from dagpack_hf.attention.support import base_model_of

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)


@contextmanager
def recorded_router_logits(model: torch.nn.Module, wanted: bool) -> Iterator[list[tuple[torch.Tensor, ...]]]:
    """Collect the router logits of the forward passes in a `with` block, which TRL's fused LM head does not return."""
    recorded: list[tuple[torch.Tensor, ...]] = []
    if not wanted:
        yield recorded
        return
    hook = base_model_of(model).base_model.register_forward_hook(
        lambda module, inputs, outputs: recorded.append(outputs.router_logits)
    )
    try:
        yield recorded
    finally:
        hook.remove()


def load_balancing_loss(
    config: PreTrainedConfig, router_logits: tuple[Any, ...], sequence_count: torch.Tensor
) -> torch.Tensor:
    """The loss of Switch Transformers (https://huggingface.co/papers/2101.03961), equations 4 to 6.

    Args:
        config: of the text model.
        router_logits: of each layer, `(B * T, experts)`.
        sequence_count: `(B, T)`, how often each position counts.
    """
    is_filled = sequence_count.sum() > 0  # a batch of padding has a loss of 0, not of 0 / 0
    mask = torch.where(is_filled, sequence_count, torch.ones_like(sequence_count))
    return is_filled * load_balancing_loss_func(router_logits, config.num_experts, config.num_experts_per_tok, mask)


_HUB_OPTIONS = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder")
"""Options of loading a model that say where its config is."""


def wants_router_loss(model: PreTrainedModel | PeftModel | str, args: SFTConfig) -> bool:
    """Whether training has a load-balancing loss, told before a model is loaded, so that data can be packed for it."""
    if isinstance(model, str):
        given = cast(dict[str, Any], args.model_init_kwargs or {})
        config = AutoConfig.from_pretrained(model, **{name: given[name] for name in _HUB_OPTIONS if name in given})
    else:
        config = cast(PreTrainedConfig, model.config)
    config = config.get_text_config()
    coefficient = args.router_aux_loss_coef
    if coefficient is None:
        coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    return bool(coefficient) and hasattr(config, "output_router_logits")


def check_router_loss(model: PreTrainedModel, args: SFTConfig, is_counted: bool) -> bool:
    """Whether a mixture of experts trains with the loss; if it cannot, the loss is switched off with a notice.

    Args:
        model: a mixture of experts that has the loss.
        args: with `router_aux_loss_coef`.
        is_counted: whether batches say how many sequences pass through a position.

    Raises:
        ValueError: the loss was asked for where it cannot be; or checkpointing is reentrant, whose forward pass keeps
            no gradients of what is recorded in it, so that the routers would not be trained by the loss, in silence.
    """
    if is_counted and route_of(model) == "registered function":
        checkpointing = cast(dict[str, Any], args.gradient_checkpointing_kwargs or {})
        if args.gradient_checkpointing and checkpointing.get("use_reentrant"):
            raise ValueError(
                "The load-balancing loss of a mixture of experts has no gradients under reentrant checkpointing. Set "
                "use_reentrant=False in gradient_checkpointing_kwargs, or router_aux_loss_coef=0."
            )
        return True
    needs = (
        "The data do not say how many sequences pass through a token, or the model takes a ready mask, which has no "
        "room for it. Pack rows with count_sequences=True, of plain sequences or of token trees whose turns each end "
        "with a target"
    )
    if args.router_aux_loss_coef:
        raise ValueError(
            f"router_aux_loss_coef={args.router_aux_loss_coef} is not supported here: the load-balancing loss of a "
            f"mixture of experts would count shared tokens once. {needs}, or leave router_aux_loss_coef unset or set "
            "it to 0."
        )
    logger.warning(
        "The load-balancing loss of the model (router_aux_loss_coef) is off; the routers train on the loss. %s to "
        "have it.",
        needs,
    )
    model.config.get_text_config().output_router_logits = False
    return False
