"""How far the policy has moved from the sampler, measured on the sampler's own tokens.

In: a prepared batch, log-probs [B, T] under the policy. Out: nats a token.

k3 = exp(p - q) - (p - q) - 1 has mean KL(q || p) over tokens drawn from q, is never negative and little scattered. The
other direction, exp(q - p) on the same tokens, has mean chi^2 - KL and explodes.
"""

import torch
from torch import Tensor

from p2prl.objectives.batch import Batch, token_log_ratio

_LOG_LIMIT = 20.0  # one token that moved further would be all that the mean shows


@torch.no_grad()
def sampler_kl(batch: Batch, logp: Tensor) -> Tensor:
    """float64 [B, T], k3 on drawn tokens, 0 elsewhere."""
    difference = token_log_ratio(batch, logp).double().clamp(-_LOG_LIMIT, _LOG_LIMIT)
    return torch.where(batch.mask, torch.expm1(difference) - difference, 0.0)
