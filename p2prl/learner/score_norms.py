"""Exact norms of every answer's score, and any weighted sum of scores, from one forward and one backward pass.

In: a module, a function that runs it and gives log-probs [B, T]. Out: a `ScorePass`: norms [B] of s_i = the gradient of
answer i's summed log-prob; then, once the weights of the answers are known, sum_i c_i s_i into `.grad`.

The backward pass stops at the activations. What each layer saw and what came back to it gives the norms
(`score_layers`); the same pairs, weighted, give the gradient in one product a layer, as an ordinary backward would.
So what needs norms before it knows its weights (VCPO's baseline) pays for neither a second pass nor one an answer.

Invariants: layers are hooked only while the pass runs; a layer, or a use of a parameter, that is not known makes the
whole pass fall back to one backward an answer, with a warning, never to an approximation.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from p2prl.learner.score_layers import Grams, ParameterUse, Weighted
from p2prl.learner.score_rules import Rule, find_rule, trained


class ScoreNormWarning(UserWarning):
    """Norms are made with one backward pass an answer: right, but slow."""


@dataclass
class ScorePass:
    """`norms` [B] and `logp` [B, T], detached. `fallback`: why one backward an answer was needed, else empty."""

    norms: Tensor
    logp: Tensor
    fallback: str
    _accumulate: Callable[[Tensor], None]

    def gradient(self, weights: Tensor) -> None:
        """Add sum_i weights_i s_i, weights [B], to the `.grad` of every trainable parameter."""
        self._accumulate(weights.detach())


@dataclass
class _Call:
    """`edge` stands for the layer's output in the graph, so that the output itself need not be held."""

    rule: Rule
    value: Tensor
    version: int
    rows: int
    edge: GradientEdge | None


class ScoreNorms:
    """What is known of a module's layers; make it anew when layers or what is trained change."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        # A tied parameter once, wherever it is used.
        self._trained = list({id(item): item for layer in module.modules() for item in trained(layer)}.values())
        self._names = {id(item): name for name, item in module.named_parameters()}
        self._rules: dict[torch.nn.Module, Rule] = {}
        self._rows = 1
        self.unknown = ""
        for name, layer in module.named_modules():
            if not trained(layer):
                continue
            rule = find_rule(layer)
            if rule is None:
                self.unknown = self.unknown or f"the layer {name} ({type(layer).__name__}) is not known"
            else:
                self._rules[layer] = rule

    def run(self, logprobs: Callable[[], Tensor]) -> ScorePass:
        """`logprobs` runs the module: log-probs [B, T], 0 where they don't count. Rows don't see each other."""
        calls: list[_Call] = []
        with self._hooked(calls) if not self.unknown else _nothing():
            logp = logprobs()
        reason = self.unknown or self._obstacle(logp, calls)
        if reason:
            warnings.warn(f"score norms take one backward pass an answer: {reason}", ScoreNormWarning, stacklevel=2)
            return self._one_by_one(logp, reason)
        return self._batched(logp, calls)

    @contextmanager
    def _hooked(self, calls: list[_Call]) -> Iterator[None]:
        running = True

        def note(layer: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any], result: Tensor) -> Tensor:
            if not running:  # checkpointing runs layers again during the backward pass
                return result
            value = args[0] if args else next(iter(named.values()))
            rule = self._rules[layer]
            value, result = rule.per_answer(value, result, self._rows)
            edge = get_gradient_edge(result) if result.requires_grad else None
            calls.append(_Call(rule, value, value._version, len(result), edge))
            return result

        first = self._module.register_forward_pre_hook(self._count_rows, with_kwargs=True)
        handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in self._rules]
        try:
            yield
        finally:
            running = False
            for handle in (first, *handles):
                handle.remove()

    def _count_rows(self, _: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [item for item in (*args, *named.values()) if isinstance(item, Tensor) and item.ndim > 1]
        self._rows = len(tensors[0]) if tensors else 1

    def _obstacle(self, logp: Tensor, calls: list[_Call]) -> str:
        """Why what was noted doesn't tell each answer's gradient, else empty."""
        uses: Counter[int] = Counter()
        found, nodes = _graph_uses(logp)
        for call in calls:
            kind = type(call.rule.layer).__name__
            if call.edge is None:
                return f"a {kind} ran without a graph"
            if call.value._version != call.version:
                return f"what a {kind} saw was changed in place"
            if not len(call.value) == call.rows == len(logp):
                return f"a {kind} ran on {len(call.value)} rows for {len(logp)} answers"
            if call.edge.node in nodes:
                uses.update(id(item) for item in call.rule.parameters)
        for parameter, number in found.items():
            if number > uses[parameter] and parameter in self._names:
                return f"the parameter {self._names[parameter]} is used outside of a layer that is known"
        return ""

    def _batched(self, logp: Tensor, calls: list[_Call]) -> ScorePass:
        edges = [call.edge for call in calls if call.edge is not None]
        returned = torch.autograd.grad(logp.sum(), edges, allow_unused=True)
        uses: dict[int, ParameterUse] = {}
        square = _zeros(logp)
        with torch.no_grad():
            for call, back in zip(calls, returned, strict=True):
                if back is not None:
                    call.rule.note(uses, call.value, back)
            grams = Grams()
            for use in uses.values():
                square = square + use.square(grams)

        @torch.no_grad()
        def accumulate(weights: Tensor) -> None:
            weighted = Weighted(weights)
            for use in uses.values():
                use.accumulate(weighted)

        return ScorePass(square.clamp(min=0.0).sqrt(), logp.detach(), "", accumulate)

    def _one_by_one(self, logp: Tensor, reason: str) -> ScorePass:
        square = _zeros(logp)
        for row in range(len(logp)):
            found = torch.autograd.grad(logp[row].sum(), self._trained, retain_graph=True, allow_unused=True)
            for value in found:
                if value is not None:
                    square[row] += value.to(square.dtype).square().sum()

        def accumulate(weights: Tensor) -> None:
            (logp.sum(1) * weights.to(logp.dtype)).sum().backward(retain_graph=True)

        return ScorePass(square.sqrt(), logp.detach(), reason, accumulate)


def score_pass(module: torch.nn.Module, logprobs: Callable[[], Tensor]) -> ScorePass:
    return ScoreNorms(module).run(logprobs)


def _zeros(logp: Tensor) -> Tensor:
    """[B], in at least float32."""
    return torch.zeros(len(logp), dtype=torch.promote_types(logp.dtype, torch.float32), device=logp.device)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _graph_uses(logp: Tensor) -> tuple[Counter[int], set[Any]]:
    """How often each leaf is used in the graph behind logp, by the leaf's id; and the nodes of that graph."""
    uses: Counter[int] = Counter()
    waiting: list[Any] = [logp.grad_fn] if logp.grad_fn is not None else []
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if (leaf := getattr(following, "variable", None)) is not None:
                uses[id(leaf)] += 1
            elif following not in seen:
                seen.add(following)
                waiting.append(following)
    return uses, seen
