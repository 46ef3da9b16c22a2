"""What an objective is: a pure function with named options, and how the parts of its loss add up.

In: a function `(batch, logp, *, option=...)` of a prepared batch. Out: an `Objective`, which prepares and checks.

Invariants: an unknown option is refused with the nearest name; the function never sees padding, a dropped answer that
counts, or a log-prob that is not finite; metrics are floats whose parts add up to those of the whole: shares of its
answers, or of its tokens where the name begins with `token_`.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from p2prl.errors import ConfigError
from p2prl.objectives.batch import Batch, checked_logp

Metrics = dict[str, float]
Loss = tuple[Tensor, Metrics]
Per = Literal["answer", "token"]


class Objective:
    """Call with a batch, log-probs [B, T] of its tokens under the policy, and options: (scalar loss, metrics).

    `per`: what the loss is a mean over, `num_answers` or `num_tokens` of the batch.
    """

    def __init__(self, function: Callable[..., Loss], per: Per = "answer") -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.per: Per = per
        parameters = inspect.signature(function).parameters.values()
        self.options = {item.name: item.default for item in parameters if item.kind is item.KEYWORD_ONLY}
        self._takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters)
        self.name = getattr(function, "__name__", type(function).__name__)

    def __call__(self, batch: Batch, logp: Tensor, **options: object) -> Loss:
        self.check(options)
        batch = batch.prepare()
        return self._function(batch, checked_logp(batch, logp), **options)

    def check(self, options: dict[str, object]) -> None:
        """ConfigError for an option it doesn't take, or one that it needs and lacks."""
        for name in options:
            if name not in self.options and not self._takes_any:
                raise ConfigError(
                    f"the objective {self.name} has no option {name!r}; {nearest(name, list(self.options))}"
                )
        needed = [name for name, default in self.options.items() if default is inspect.Parameter.empty]
        missing = [name for name in needed if name not in options]
        if missing:
            raise ConfigError(f"the objective {self.name} needs the option {missing[0]!r}; give it a value")


def objective(per: Per) -> Callable[[Callable[..., Loss]], Objective]:
    return lambda function: Objective(function, per)


def nearest(name: str, names: list[str]) -> str:
    """How a message about an unknown name ends."""
    near = difflib.get_close_matches(name, names, 1)
    begin = f"did you mean {near[0]!r}? There are" if near else "there are"
    return f"{begin}: {', '.join(sorted(names)) or 'none'}"


def positive(name: str, value: float | None) -> None:
    """ConfigError unless an option is None or a finite number above 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value}; it must be a number above 0")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; {nearest(str(value), list(choices))}")


def answer_mean(batch: Batch, terms: Tensor) -> Tensor:
    """(1/B) sum over live answers of terms [B]; 0 with gradient 0 where there are none."""
    assert batch.num_answers is not None
    return torch.where(batch.live, terms, 0.0 * terms).sum() / max(batch.num_answers, 1.0)


def token_mean(batch: Batch, terms: Tensor) -> Tensor:
    """(1/N) sum over drawn tokens of terms [B, T]; 0 with gradient 0 where there are none."""
    assert batch.num_tokens is not None
    return torch.where(batch.mask, terms, 0.0 * terms).sum() / max(batch.num_tokens, 1.0)


def within_answer(batch: Batch, terms: Tensor) -> Tensor:
    """[B], (1/T_i) sum over the answer's drawn tokens of terms [B, T]."""
    return torch.where(batch.mask, terms, 0.0 * terms).sum(1) / batch.length


def answer_share(batch: Batch, chosen: Tensor) -> float:
    """Of the whole batch's answers, those chosen (bool [B]): shares of its parts add up."""
    return float((chosen & batch.live).sum()) / max(batch.num_answers or 0.0, 1.0)


def token_share(batch: Batch, chosen: Tensor) -> float:
    return float((chosen & batch.mask).sum()) / max(batch.num_tokens or 0.0, 1.0)
