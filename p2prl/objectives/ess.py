"""Effective sample size: how much a batch of stale answers still says, and what step it may carry.

In: log weights of answers. Out: rho in (0, 1], the multiplier of one step's learning rate.

Invariants: in log space and float64, no epsilon; states merge associatively, so that learners and micro-batches give
one rho (rho itself is never averaged). Source: VCPO, arXiv 2602.17616.
"""

import math

import msgspec
import torch
from torch import Tensor


class EssState(msgspec.Struct, frozen=True):
    """Sums over n answers relative to the largest log weight: sum e^(l - max) and sum e^(2 (l - max))."""

    max: float = -math.inf
    sum: float = 0.0
    sum2: float = 0.0
    n: int = 0

    @classmethod
    def of(cls, log_weight: Tensor) -> "EssState":
        """From log weights [B]; -inf is a weight of 0, which counts in n."""
        if not log_weight.numel():
            return cls()
        values = log_weight.detach().to("cpu", torch.float64)
        top = values.max().item()
        if not math.isfinite(top):
            return cls(top, 0.0, 0.0, values.numel()) if top == -math.inf else cls(math.nan, 0.0, 0.0, values.numel())
        weights = torch.exp(values - top)
        return cls(top, weights.sum().item(), weights.square().sum().item(), values.numel())

    def merge(self, other: "EssState") -> "EssState":
        num = self.n + other.n
        if math.isnan(self.max) or math.isnan(other.max):
            return EssState(math.nan, 0.0, 0.0, num)
        top = max(self.max, other.max)
        if top == -math.inf:
            return EssState(top, 0.0, 0.0, num)
        mine, theirs = math.exp(self.max - top), math.exp(other.max - top)
        return EssState(
            top, self.sum * mine + other.sum * theirs, self.sum2 * mine * mine + other.sum2 * theirs * theirs, num
        )

    @property
    def rho(self) -> float:
        """(sum w)^2 / (B sum w^2); nan when it is undefined (no answers, no weight, a weight that is not finite)."""
        if self.n == 0 or not self.sum2 > 0 or not math.isfinite(self.max):
            return math.nan
        return self.sum * self.sum / self.sum2 / self.n

    @property
    def top_share(self) -> float:
        """max W / sum W: what one answer has of all the weight; nan when undefined."""
        return 1 / self.sum if self.n and self.sum > 0 and math.isfinite(self.max) else math.nan


def ess_ratio(log_ratio: Tensor) -> float:
    """rho = exp(2 LSE(l) - LSE(2 l)) / B of l [B]; nan when undefined."""
    return EssState.of(log_ratio).rho


def lr_multiplier(rho: float, rho_on: float = 1.0, power: float = 0.5) -> float:
    """min(1, rho / rho_on) ** power; 0.0 (skip the step) when rho is not finite; an impossible rho_on counts as 1.

    `power` 0.5 is VCPO's square root; 1.0 shrinks the step as fast as the sample shrinks.
    """
    if not math.isfinite(rho) or rho < 0:
        return 0.0
    share = min(1.0, rho / usable_rho_on(rho_on))
    return math.sqrt(share) if power == 0.5 else share**power


def usable_rho_on(rho_on: float) -> float:
    return rho_on if math.isfinite(rho_on) and rho_on > 0 else 1.0
