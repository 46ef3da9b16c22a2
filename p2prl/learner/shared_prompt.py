"""One pass over a prompt, however many answers it has.

In: a causal language model of transformers, token ids of prompts with their answers. Out: logits at the answers.

Invariant: values and gradients are those of one plain pass over whole rows, but for float error: under causal attention
a prompt's keys and values don't depend on what follows, and gradients of all its answers add up in them.
"""

from typing import Any

import torch
from torch import Tensor

_LEAST_COLUMNS = 16
_LEAST_SAVING = 0.25  # of all the columns: below it a second pass costs more than it saves


def distinct_prompts(ids: Tensor, num_columns: int) -> tuple[Tensor, Tensor] | None:
    """(distinct beginnings [U, num_columns], which of them each row has [B]); None where sharing doesn't pay."""
    if num_columns < _LEAST_COLUMNS:
        return None
    distinct, number = torch.unique(ids[:, :num_columns], dim=0, return_inverse=True)
    saved = (len(ids) - len(distinct)) * num_columns
    return (distinct, number) if saved >= _LEAST_SAVING * ids.numel() else None


def continue_prompts(module: torch.nn.Module, distinct: Tensor, number: Tensor, rest: Tensor) -> Tensor:
    """Logits [B, R, V] of `rest` [B, R], each row after its prompt."""
    from transformers import DynamicCache  # only a learner process has transformers

    model: Any = module
    cache = DynamicCache(config=model.config)
    model(input_ids=distinct, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_select_indices(number)
    return model(input_ids=rest, past_key_values=cache, use_cache=True).logits
