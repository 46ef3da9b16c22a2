"""GEPO's weights with VCPO's minimum-variance baseline: the swarm's default (arXiv 2508.17850 and 2602.17616).

In: a prepared batch, log-probs [B, T] under the policy, per-answer score norms where known. Out: loss, metrics.

Invariants: with the mean baseline its gradient is that of `gepo`; equal rewards and groups of one give no gradient; the
minimum-variance baseline needs its groups whole and says so when they are not.
"""

import torch
from torch import Tensor

from p2prl.objectives.baseline import least_variance_advantage
from p2prl.objectives.batch import Batch
from p2prl.objectives.gepo import is_clipped, log_weight, weight_metrics
from p2prl.objectives.objective import Loss, answer_mean, answer_share, objective, one_of, positive


@objective(per="answer")
def gepo_vcpo(
    batch: Batch,
    logp: Tensor,
    *,
    clip: float | None = 0.2,
    baseline: str = "min_variance",
    leave_one_out: bool = False,
    age_band: bool = False,
    baseline_over: str = "live",
) -> Loss:
    """-(1/B) sum_i live_i w_i (R_i - b_g), gradient through w_i (see `gepo`) alone.

    live_i: not clipped on the side of R_i - mean_g R; b_g by `baseline`: the plain `mean`, or `min_variance` with
    omega_i = live_i w_i (see `baseline.py`), which is the plain mean where score norms are not known. logp [B, T]; the
    rest [B]. `age_band`: A-3PO's band of the answer's age instead of 1 -+ clip.

    Of stale data the clip takes mostly the wrong answers; what lives in the group then has one reward, b_g equals it, and
    the gradient is 0. `baseline_over="all"` sets omega_i = w_i: the baseline of the whole group, which keeps it.
    """
    positive("clip", clip)
    one_of("baseline", baseline, ("mean", "min_variance"))
    one_of("baseline_over", baseline_over, ("live", "all"))
    assert batch.advantage is not None
    weight = torch.exp(log_weight(batch, logp))
    held = weight.detach()
    clipped = is_clipped(batch, held, clip, age_band)
    advantage = batch.advantage
    least = baseline == "min_variance" and batch.score_norm is not None
    if least:
        omega = held if baseline_over == "all" else torch.where(clipped, 0.0, held)
        advantage = least_variance_advantage(batch, omega, leave_one_out=leave_one_out)
    loss = -answer_mean(batch, torch.where(clipped, 0.0 * weight, weight * advantage))
    share = answer_share(batch, torch.full_like(batch.live, least))
    return loss, weight_metrics(batch, held, clipped) | {"baseline_min_variance": share}
