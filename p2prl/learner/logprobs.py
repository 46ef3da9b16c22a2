"""Log-probs of the answers' tokens under the policy.

In: a policy, rows, which of them. Out: log-probs and entropies [N, A], 0 where the mask is off.

Invariants: log_softmax of logits / temperature in float32, at the answers' tokens alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from p2prl.learner.collate import Rows
from p2prl.learner.policy import Policy
from p2prl.objectives.batch import Batch


@dataclass(frozen=True)
class TokenLogprobs:
    logp: Tensor  # [N, A]
    entropy: Tensor  # [N, A]


def token_logprobs(policy: Policy, rows: Rows, batch: Batch, picked: Tensor) -> TokenLogprobs:
    """`batch` is the part of `rows.batch` with the rows `picked` (long [N]), on the policy's device."""
    device = policy.device
    ids = rows.ids[picked].to(device)
    row, offset = batch.mask.nonzero(as_tuple=True)
    position = rows.prompt_length[picked].to(device)[row] + offset
    temperature = rows.temperature[picked].to(device)
    logits = policy.answer_logits(ids, row, position) / temperature[row, None]
    every = torch.log_softmax(logits, -1)
    chosen = every.gather(1, ids[row, position, None]).squeeze(1)
    with torch.no_grad():
        spread = -(every.exp() * every).sum(-1)
    empty = torch.zeros(batch.mask.shape, dtype=torch.float32, device=device)
    return TokenLogprobs(empty.index_put((row, offset), chosen), empty.index_put((row, offset), spread))
