"""The gradient of an objective that needs score norms before it can weigh its answers (VCPO's baseline).

In: a batch of whole groups, a function that runs some of its rows. Out: log-probs, loss and metrics; `.grad` of the
policy's parameters grows by the gradient of the loss.

The objective is asked with log-probs cut from the model: its gradient there is one number an answer, the weight of the
answer's score, and that is what `ScorePass.gradient` takes. A group too large for one pass goes in pieces: norms piece
by piece, then the weights of all, then an ordinary pass for each piece again.

Invariants: the gradient is that of the objective itself with the exact norms, whatever the pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from p2prl.learner.collate import micro_batches
from p2prl.learner.score_norms import ScoreNorms
from p2prl.objectives.batch import Batch
from p2prl.objectives.objective import Metrics, Objective

# Rows of the batch (long [N]) to (log-probs with a graph, entropy), each [N, A].
Run = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Scored:
    logp: Tensor  # [B, A], detached
    entropy: Tensor  # [B, A]
    loss: float
    metrics: Metrics


def needs_score_norms(objective: Objective, options: dict[str, Any]) -> bool:
    return objective.name == "vcpo" or (objective.name == "gepo_vcpo" and options.get("baseline") == "min_variance")


def scored_step(
    norms: ScoreNorms, run: Run, batch: Batch, pieces: Sequence[Tensor], objective: tuple[Objective, dict[str, Any]]
) -> Scored:
    """`pieces`: rows of `batch` (long [N] each, every row once) that are run together."""
    entropies: list[Tensor] = []

    def logprobs(rows: Tensor) -> Tensor:
        logp, entropy = run(rows)
        entropies.append(entropy)
        return logp

    norm = torch.zeros(len(batch.reward), device=batch.reward.device)
    logp = torch.zeros(batch.mask.shape, device=norm.device)
    done = None
    for rows in pieces:
        done = None  # what one piece holds goes before the next is run
        done = norms.run(lambda rows=rows: logprobs(rows))
        norm[rows], logp[rows] = done.norms.to(norm.dtype), done.logp.to(logp.dtype)
    entropy = torch.zeros_like(logp)
    entropy[torch.cat(list(pieces))] = torch.cat(entropies)

    leaf = logp.clone().requires_grad_()
    loss, metrics = objective[0](replace(batch, score_norm=norm), leaf, **objective[1])
    count = batch.num_answers or 0.0
    (loss * count).backward()
    assert leaf.grad is not None and done is not None
    if len(pieces) == 1:
        # The same on every token of an answer: its mean.
        done.gradient((leaf.grad.sum(1) / batch.length)[pieces[0]])
    else:
        done = None
        for rows in pieces:
            (run(rows)[0] * leaf.grad[rows]).sum().backward()
    return Scored(logp, entropy, loss.item() * count, metrics)


def group_batches(length: Sequence[int], group: Sequence[int], budget: int) -> list[list[list[int]]]:
    """Micro-batches of whole groups, each a list of pieces (row numbers) of at most `budget` padded tokens.

    A micro-batch has one piece, but for a group that is larger than the budget by itself.
    """
    members: dict[int, list[int]] = {}
    for row, name in enumerate(group):
        members.setdefault(name, []).append(row)
    longest = {name: max(length[row] for row in rows) for name, rows in members.items()}
    batches: list[list[list[int]]] = []
    widest = 0
    for name in sorted(members, key=lambda name: (-longest[name], name)):
        rows = members[name]
        if len(rows) * longest[name] > budget:
            pieces = micro_batches([length[row] for row in rows], budget)
            batches.append([[rows[number] for number in piece] for piece in pieces])
            widest = 0
        elif not widest or (len(batches[-1][0]) + len(rows)) * widest > budget:
            batches.append([list(rows)])
            widest = longest[name]
        else:
            batches[-1][0].extend(rows)
    return batches
