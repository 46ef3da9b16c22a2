"""The answers that an objective sees, as padded tensors.

In: answers of prompt groups. Out: a `Batch` whose group statistics are known, whole or in parts.

Invariants: an answer without a usable token (none drawn, a log-prob or reward that is not finite) is dropped before
anything is counted; what lies on padding has no influence; losses and gradients of the parts that `split` gives sum to
those of the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from p2prl.errors import BatchError
from p2prl.objectives.groups import all_equal, group_index, group_logsumexp, group_sd, group_sum

# Of a log-ratio where its exponential is taken: e^60 and sums of it are finite in float32. Past that there is nothing
# left to learn from the token, and no gradient flows.
RATIO_LIMIT = 60.0
# Of an answer's summed log-prob: times weights and advantages it must stay finite in float32.
LARGEST_SUM = 1e30


@dataclass(frozen=True)
class Batch:
    """B answers of at most T tokens. The fields from `log_expectation` on follow from the others: see `prepare`."""

    group: Tensor  # long [B], any numbers; equal ones belong to one prompt
    mask: Tensor  # bool [B, T], the tokens that the policy itself drew
    behavior_logp: Tensor  # float [B, T], as recorded when they were drawn
    reward: Tensor  # float [B]
    age: Tensor  # long [B, T], versions
    score_norm: Tensor | None = None  # float [B], norm of the gradient of the answer's summed log-prob
    prox_logp: Tensor | None = None  # float [B, T], under the weights at the start of the step
    log_expectation: Tensor | None = None  # float [B], GEPO's log E of the answer's group
    advantage: Tensor | None = None  # float [B], reward minus the group's mean
    num_answers: float | None = None  # live answers of the whole batch: what a mean divides by
    num_tokens: float | None = None
    group_size: Tensor | None = None  # long [B], live answers in the answer's group
    group_spread: Tensor | None = None  # float [B], standard deviation (n - 1) of the group's rewards
    tail_moment: Tensor | None = None  # float [B, T], see `tail_moments`, of prox_logp; None without it

    @property
    def live(self) -> Tensor:
        """bool [B]: the answers that count."""
        return self.mask.any(1)

    @property
    def length(self) -> Tensor:
        """[B], tokens of each answer, at least 1 so that it can divide."""
        return self.mask.sum(1).clamp(min=1).to(self.behavior_logp.dtype)

    def prepare(self) -> "Batch":
        """Drop what can't be used and fill what follows from the batch. Doing it twice changes nothing."""
        self._check()
        mask = self.mask.bool()
        usable = _usable(mask, self.behavior_logp) & self.reward.isfinite()
        if self.prox_logp is not None:
            usable &= _usable(mask, self.prox_logp)
        mask = mask & usable[:, None]
        reward = torch.where(usable, self.reward, 0.0)
        batch = replace(self, mask=mask, reward=reward)
        live = batch.live
        number, index = group_index(self.group)
        size = group_sum(live.to(torch.long), index, number)
        mean = group_sum(torch.where(live, reward, 0.0), index, number) / size.clamp(min=1)
        equal = all_equal(reward, live, index, number)
        # Exactly 0 where rewards are equal: a mean of equal numbers need not be that number.
        advantage = torch.where(live & ~equal[index], reward - mean[index], 0.0)
        mean_q = torch.where(mask, self.behavior_logp, 0.0).sum(1) / batch.length
        expectation = group_logsumexp(2 * mean_q, live, index, number) - group_logsumexp(mean_q, live, index, number)
        return replace(
            batch,
            log_expectation=_or(self.log_expectation, torch.where(live, expectation[index], 0.0)),
            advantage=_or(self.advantage, advantage),
            num_answers=float(live.sum()) if self.num_answers is None else self.num_answers,
            num_tokens=float(mask.sum()) if self.num_tokens is None else self.num_tokens,
            group_size=_or(self.group_size, size[index]),
            group_spread=_or(self.group_spread, group_sd(advantage, live, index, number)[index]),
            tail_moment=batch._tail_moment(),
        )

    def split(self, rows: Tensor | Sequence[int]) -> "Batch":
        """The part with these rows (N row numbers), which keeps the statistics of the whole batch.

        Where score norms are known the minimum-variance baseline will be asked for, and that needs whole groups:
        BatchError for rows that cut one.
        """
        whole, rows = self.prepare(), torch.as_tensor(rows, dtype=torch.long)
        values = {field.name: getattr(whole, field.name) for field in fields(whole)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        part = replace(whole, **{name: value[rows.to(value.device)] for name, value in tensors.items()})
        if part.score_norm is not None:
            require_whole_groups(part)
        return part

    def to(self, device: torch.device | str) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})

    def _tail_moment(self) -> Tensor | None:
        if self.tail_moment is not None or self.prox_logp is None:
            return self.tail_moment
        return tail_moments(self, self.prox_logp)

    def _check(self) -> None:
        shape = tuple(self.mask.shape)
        if len(shape) != 2:
            raise BatchError(f"a batch's mask is [answers, tokens], not {list(shape)}")
        for name in ("behavior_logp", "age", "prox_logp"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != shape:
                raise BatchError(f"the batch's {name} is {list(value.shape)}, its mask {list(shape)}; they must agree")
        for name in ("group", "reward", "score_norm", "log_expectation", "advantage"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != shape[:1]:
                raise BatchError(f"the batch's {name} is {list(value.shape)}, not [{shape[0]}], one for each answer")
        if self.age.is_floating_point():
            raise BatchError("the batch's ages are floating-point numbers; an age is a whole number of versions")
        if bool(((self.age < 0) & self.mask.bool()).any()):
            raise BatchError("the batch has tokens of negative age; a token can't be newer than the learner's weights")


def require_whole_groups(batch: Batch) -> None:
    """BatchError when a prepared part lacks live answers of one of its groups."""
    assert batch.group_size is not None
    live = batch.live
    number, index = group_index(batch.group)
    here = group_sum(live.long(), index, number)[index]
    if bool((here != batch.group_size)[live].any()):
        raise BatchError("the minimum-variance baseline needs whole groups; this part of the batch cuts one")


def checked_logp(batch: Batch, logp: Tensor) -> Tensor:
    """logp [B, T] with padding set to 0, before any exp can meet it; BatchError for what is not finite elsewhere."""
    if logp.shape != batch.mask.shape:
        raise BatchError(f"logp is {list(logp.shape)}, the batch's mask {list(batch.mask.shape)}; they must agree")
    masked = torch.where(batch.mask, logp, 0.0)
    if not bool(_usable(batch.mask, logp.detach()).all()):
        raise BatchError("the policy gives log-probs that are not finite; its weights or its arithmetic are broken")
    return masked


def token_log_ratio(batch: Batch, logp: Tensor) -> Tensor:
    """p - q on drawn tokens, 0 elsewhere: [B, T]."""
    return torch.where(batch.mask, logp - torch.where(batch.mask, batch.behavior_logp, 0.0), 0.0)


def token_ratio(batch: Batch, logp: Tensor) -> Tensor:
    """exp(p - q) on drawn tokens, 1 elsewhere: [B, T], within e^+-60."""
    return torch.exp(token_log_ratio(batch, logp).clamp(-RATIO_LIMIT, RATIO_LIMIT))


def sequence_log_ratio(batch: Batch, logp: Tensor) -> Tensor:
    """l_i = sum over drawn tokens of (p - q): [B], 0 for a dropped answer, no gradient."""
    return token_log_ratio(batch, logp.detach()).sum(1)


def log_ratio(batch: Batch, logp: Tensor) -> Tensor:
    """float64 [num live answers], l_i = sum over drawn tokens of (p - q), no gradient."""
    return token_log_ratio(batch, logp.detach()).double().sum(1)[batch.live]


def normalised_advantage(batch: Batch) -> Tensor:
    """GRPO's A' = (R - mean) / (sd + 1e-4) [B] of a prepared batch."""
    assert batch.advantage is not None and batch.group_spread is not None
    return batch.advantage / (batch.group_spread + 1e-4)


def tail_moments(batch: Batch, logp: Tensor) -> Tensor:
    """[B, T]: for each token the mean of (p - q)^2 over it and all tokens of the batch that drifted less; 0 elsewhere.

    It falls from the token that drifted most to the one that drifted least, so that "below a limit" drops the
    fewest tokens that bring the mean of the rest under the limit.
    """
    drift = token_log_ratio(batch, logp.detach())[batch.mask].square()
    ascending, order = torch.sort(drift, stable=True)
    count = torch.arange(1, len(drift) + 1, dtype=drift.dtype, device=drift.device)
    mean = torch.empty_like(drift)
    mean[order] = ascending.cumsum(0) / count
    result = torch.zeros_like(batch.behavior_logp)
    result[batch.mask] = mean
    return result


def _usable(mask: Tensor, logp: Tensor) -> Tensor:
    """bool [B]: the answer's summed log-prob, as finite as its least finite token, is a number to reckon with."""
    return torch.where(mask, logp, 0.0).sum(1).abs() < LARGEST_SUM


def _or(given: Tensor | None, computed: Tensor) -> Tensor:
    return computed if given is None else given
