"""The answers that an objective sees, as padded tensors.

In: answers of prompt groups. Out: a `Batch` whose group statistics are known, whole or in parts.

Invariants: an answer without a usable token (none drawn, a log-prob or reward that is not finite) is dropped before
anything is counted; what lies on padding has no influence; losses and gradients of the parts that `split` gives sum to
those of the whole.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B answers of at most T tokens. The fields from `log_expectation` on follow from the others: see `prepare`."""

    group: Tensor  # long [B], any numbers; equal ones belong to one prompt
    mask: Tensor  # bool [B, T], the tokens that the policy itself drew
    behavior_logp: Tensor  # float [B, T], as recorded when they were drawn
    reward: Tensor  # float [B]
    age: Tensor  # long [B, T], versions
    score_norm: Tensor | None = None  # float [B], norm of the gradient of the answer's summed log-prob
    prox_logp: Tensor | None = None  # float [B, T]
    log_expectation: Tensor | None = None  # float [B], GEPO's log E of the answer's group
    advantage: Tensor | None = None  # float [B], reward minus the group's mean
    num_answers: float | None = None  # live answers of the whole batch: what a mean divides by
    num_tokens: float | None = None
    group_size: Tensor | None = None  # long [B], live answers in the answer's group

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
        finite = torch.where(self.mask, self.behavior_logp, 0.0).isfinite().all(1) & self.reward.isfinite()
        mask = self.mask.bool() & finite[:, None]
        reward = torch.where(finite, self.reward, 0.0)
        batch = replace(self, mask=mask, reward=reward)
        live = batch.live
        number, index = self._index()
        size = group_sum(live.to(torch.long), index, number)
        mean = group_sum(torch.where(live, reward, 0.0), index, number) / size.clamp(min=1)
        equal = _all_equal(reward, live, index, number)
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
        )

    def split(self, rows: Tensor) -> "Batch":
        """The part with these rows (long [N]), which keeps the statistics of the whole batch."""
        whole = self.prepare()
        values = {field.name: getattr(whole, field.name) for field in fields(whole)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return replace(whole, **{name: value[rows.to(value.device)] for name, value in tensors.items()})

    def to(self, device: torch.device | str) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})

    def _index(self) -> tuple[int, Tensor]:
        values, index = torch.unique(self.group, return_inverse=True)
        return len(values), index

    def _check(self) -> None:
        shape = tuple(self.mask.shape)
        if len(shape) != 2:
            raise ValueError(f"a batch's mask is [answers, tokens], not {list(shape)}")
        for name in ("behavior_logp", "age", "prox_logp"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != shape:
                raise ValueError(f"the batch's {name} is {list(value.shape)}, its mask {list(shape)}; they must agree")
        for name in ("group", "reward", "score_norm"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != shape[:1]:
                raise ValueError(f"the batch's {name} is {list(value.shape)}, not [{shape[0]}], one for each answer")
        if bool(((self.age < 0) & self.mask.bool()).any()):
            raise ValueError("the batch has tokens of negative age; a token can't be newer than the learner's weights")


def checked_logp(batch: Batch, logp: Tensor) -> Tensor:
    """logp [B, T] with padding set to 0, before any exp can meet it; ValueError for what is not finite elsewhere."""
    if logp.shape != batch.mask.shape:
        raise ValueError(f"logp is {list(logp.shape)}, the batch's mask {list(batch.mask.shape)}; they must agree")
    masked = torch.where(batch.mask, logp, 0.0)
    if not bool(masked.detach().isfinite().all()):
        raise ValueError("the policy gives log-probs that are not finite; its weights or its arithmetic are broken")
    return masked


def token_log_ratio(batch: Batch, logp: Tensor) -> Tensor:
    """p - q on drawn tokens, 0 elsewhere: [B, T]."""
    return torch.where(batch.mask, logp - torch.where(batch.mask, batch.behavior_logp, 0.0), 0.0)


def log_ratio(batch: Batch, logp: Tensor) -> Tensor:
    """float64 [num live answers], l_i = sum over drawn tokens of (p - q), no gradient."""
    with torch.no_grad():
        difference = token_log_ratio(batch, logp).double()
        return difference.sum(1)[batch.live]


def group_sum(values: Tensor, index: Tensor, number: int) -> Tensor:
    """[number], the sum of the values [B] of each group."""
    return torch.zeros(number, dtype=values.dtype, device=values.device).index_add_(0, index, values)


def group_max(values: Tensor, index: Tensor, number: int) -> Tensor:
    start = torch.full((number,), -torch.inf, dtype=values.dtype, device=values.device)
    return start.scatter_reduce_(0, index, values, "amax")


def group_logsumexp(values: Tensor, live: Tensor, index: Tensor, number: int) -> Tensor:
    """[number], over live members; 0 for a group without any."""
    top = group_max(torch.where(live, values, -torch.inf), index, number)
    top = torch.where(top.isfinite(), top, 0.0)
    total = group_sum(torch.where(live, torch.exp(torch.where(live, values - top[index], 0.0)), 0.0), index, number)
    return top + torch.log(torch.where(total > 0, total, 1.0))


def _all_equal(reward: Tensor, live: Tensor, index: Tensor, number: int) -> Tensor:
    top = group_max(torch.where(live, reward, -torch.inf), index, number)
    low = -group_max(torch.where(live, -reward, -torch.inf), index, number)
    return top <= low


def _or(given: Tensor | None, computed: Tensor) -> Tensor:
    return computed if given is None else given
