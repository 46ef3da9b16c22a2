"""The proximal policy between the sampler and the policy in training, for objectives that bound their step by it.

In: a batch, log-probs; or a policy and rows. Out: `prox_logp` [B, A], no gradient.

`a3po`: log prox = q / d + (1 - 1/d) p, d = max(age, 1), from what the step knows anyway (arXiv 2512.06547).
`recompute`: a forward pass of the parent's weights over the whole batch, before it is cut into micro-batches, so that
what ranks all tokens of a batch (m2po) sees them all.

Invariant: d = 0 and d = 1 are the same, the sampler.
"""

from dataclasses import replace

import torch
from torch import Tensor

from p2prl.learner.collate import Rows, micro_batches
from p2prl.learner.logprobs import token_logprobs
from p2prl.learner.policy import Policy
from p2prl.objectives.batch import Batch


def interpolated(batch: Batch, logp: Tensor) -> Batch:
    """The batch with a proximal policy by age; logp [B, A] is the policy's."""
    depth = batch.age.clamp(min=1).to(logp.dtype)
    share = 1 / depth
    q = torch.where(batch.mask, batch.behavior_logp, 0.0)
    held = torch.where(batch.mask, logp.detach(), 0.0)
    return replace(batch, prox_logp=share * q + (1 - share) * held)


@torch.no_grad()
def recomputed(policy: Policy, rows: Rows, budget: int) -> Rows:
    """The rows with the parent's log-probs as proximal policy; micro-batches of at most `budget` padded tokens."""
    batch = rows.batch
    live = batch.live.nonzero().flatten().tolist()
    prox = torch.zeros(batch.mask.shape)
    for numbers in micro_batches([int(rows.length[row]) for row in live], budget):
        picked = torch.tensor([live[number] for number in numbers], dtype=torch.long)
        prox[picked] = token_logprobs(policy, rows, batch.split(picked).to(policy.device), picked).logp.cpu()
    return replace(rows, batch=replace(batch, prox_logp=prox).prepare())
