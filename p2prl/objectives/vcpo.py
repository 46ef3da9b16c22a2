"""VCPO: truncated sequence weights with a minimum-variance baseline (arXiv 2602.17616).

In: a prepared batch, log-probs [B, T] under the policy, per-answer score norms. Out: loss, metrics.

Invariants: the weight is detached, the gradient flows through p alone; the step's learning rate, the other half of
VCPO, is made from `ess`, never inside the loss.
"""

import math

import torch
from torch import Tensor

from p2prl.objectives.baseline import least_variance_advantage
from p2prl.objectives.batch import Batch, sequence_log_ratio
from p2prl.objectives.objective import Loss, answer_mean, answer_share, objective, positive, within_answer


@objective(per="answer")
def vcpo(
    batch: Batch, logp: Tensor, *, cap: float = 8.0, length_norm: bool = True, leave_one_out: bool = False
) -> Loss:
    """-(1/B) sum_i sg(omega_i A_i) (1/T_i) sum_t p, omega_i = min(e^(l_i), cap), A_i = R_i - b_g (see `baseline`).

    `length_norm=False`: sums of log-probs instead of means. Without score norms b_g is the group's plain mean, and the
    metric `baseline_min_variance` is 0. The authors' code has the weight twice in W; here it is there once.
    """
    positive("cap", cap)
    assert batch.advantage is not None
    log_weight = sequence_log_ratio(batch, logp)
    omega = torch.exp(log_weight.clamp(max=math.log(cap)))
    advantage = batch.advantage
    if batch.score_norm is not None:
        advantage = least_variance_advantage(batch, omega, leave_one_out=leave_one_out, length_norm=length_norm)
    mean = within_answer(batch, logp)
    score = mean if length_norm else mean * batch.length
    metrics = {
        "capped_fraction": answer_share(batch, log_weight > math.log(cap)),
        "baseline_min_variance": answer_share(batch, torch.full_like(batch.live, batch.score_norm is not None)),
    }
    return -answer_mean(batch, omega * advantage * score), metrics
