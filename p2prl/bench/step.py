"""What an optimiser step costs, by its objective: every figure of `p2prl bench step`. No torch.

In: models, a folder of models. Out: a report (schema 1); progress. Each model is measured in a child of its own.

A step is collate, gradient and optimiser of one batch, without publishing. The plain step, the reference, is a
policy-gradient step (`reinforce`) that runs each answer with its prompt, as trainers do; `plain_shared` is the same with
one pass over each distinct prompt (`learner/shared_prompt.py`). `naive` is VCPO as its authors compute it: one forward
and backward pass an answer. `a3po` and `recompute` (decoupled PPO with a forward pass for its proximal policy) both
share prompts, as a node does.

Invariant: a ratio is the median of ratios within a round, so that a busy machine slows both sides. Where it is so busy
that even this is noise, the same ratios of CPU time, which every figure has beside it, say more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from p2prl.bench.figures import Figure, quantile, spread
from p2prl.bench.processes import Processes

PLAN = "step.json"
VARIANTS = ("plain", "plain_shared", "vcpo", "naive", "a3po", "recompute")
PLAIN = "reinforce, each answer run with its prompt (plain); plain_shared: one pass over each distinct prompt"
MB = 1e6


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a measuring child is told. At least `least_rounds` are made, and no new one begins after `longest_s`."""

    recipe: str
    num_groups: int
    group_size: int = 8
    prompt_tokens: int
    answer_tokens: int
    num_rounds: int
    least_rounds: int = 3
    longest_s: float
    threads: int = 1
    models_cache: str = ""


class Measured(msgspec.Struct, frozen=True):
    """What it says: seconds of each variant, by round, on the clock and of CPU time; the most memory each took."""

    rounds: tuple[dict[str, float], ...]
    cpu_rounds: tuple[dict[str, float], ...]
    peak_bytes: dict[str, int]
    num_tokens: int
    device: str
    threads: int


# The built-in policy has room for 64 positions; its batch is that of the demo.
MODELS = {
    "builtin": Plan(recipe="addition", num_groups=32, prompt_tokens=8, answer_tokens=5, num_rounds=15, longest_s=60.0),
    "smollm2": Plan(
        recipe="smollm2-chain-sum", num_groups=2, prompt_tokens=64, answer_tokens=64, num_rounds=5, longest_s=540.0
    ),
}
VCPO_TARGETS = {"smollm2": 1.20}
A3PO_TARGET = 0.82


def measure(plans: dict[str, Plan], say: Callable[[str], None]) -> dict[str, Measured]:
    """Whatever happens, no process and no file is left."""
    processes = Processes()
    try:
        found = {}
        for name, plan in plans.items():
            say(f"{name}: {plan.num_rounds} rounds of {', '.join(VARIANTS)}, after steps to warm up")
            (processes.root / PLAN).write_bytes(msgspec.json.encode(plan))
            found[name] = msgspec.convert(processes.child("p2prl.bench.step_run"), Measured)
        return found
    finally:
        processes.close()


def figures(name: str, plan: Plan, measured: Measured) -> list[Figure]:
    batch = (
        f"{name}, {plan.num_groups} groups of {plan.group_size}, {plan.prompt_tokens} prompt and {plan.answer_tokens} "
        f"answer tokens, float32, {measured.device}, {measured.threads} threads"
    )
    plain = f"a plain step: {PLAIN}"
    vcpo, naive = ratios(measured, "vcpo", "plain"), ratios(measured, "naive", "plain")
    shared = {"over_plain_shared": median(ratios(measured, "vcpo", "plain_shared"))} | cpu(measured, "vcpo", "plain")
    faster = {"over_vcpo": median(ratios(measured, "naive", "vcpo"))} | cpu(measured, "naive", "plain")
    recompute = "decoupled PPO, which runs the batch once more for its proximal policy"
    return [
        _ratio(
            f"{name}_vcpo_over_plain", vcpo, (f"a full VCPO step with exact score norms; {batch}", plain),
            VCPO_TARGETS.get(name), shared,
        ),
        _ratio(
            f"{name}_naive_over_plain", naive, (f"VCPO with one backward pass an answer; {batch}", plain), None, faster
        ),
        _ratio(
            f"{name}_a3po_over_recompute", ratios(measured, "a3po", "recompute"),
            (f"an A-3PO step; {batch}", recompute), A3PO_TARGET,
            cpu(measured, "a3po", "recompute"),
        ),
        Figure(
            name=f"{name}_tokens_per_s",
            value=rate(measured, "vcpo"),
            unit="tokens/s",
            how=f"prompt and answer tokens of the batch by the median VCPO step; {batch}",
            reference=rate(measured, "plain"),
            reference_how=plain,
            num_samples=len(measured.rounds),
            details={variant: rate(measured, variant) for variant in VARIANTS},
        ),
        Figure(
            name=f"{name}_peak_memory",
            value=measured.peak_bytes["vcpo"] / MB,
            unit="MB",
            how=f"the most that the process held in a VCPO step, with weights, masters and optimiser; {batch}",
            reference=measured.peak_bytes["plain"] / MB,
            reference_how=plain,
            num_samples=len(measured.rounds),
            details={variant: num_bytes / MB for variant, num_bytes in measured.peak_bytes.items()},
        ),
    ]  # fmt: skip


def short(measured: Measured) -> dict[str, Any]:
    """The figures of a model under plain names."""
    return {
        "vcpo_over_plain": median(ratios(measured, "vcpo", "plain")),
        "vcpo_over_plain_shared": median(ratios(measured, "vcpo", "plain_shared")),
        "naive_over_plain": median(ratios(measured, "naive", "plain")),
        "a3po_over_recompute": median(ratios(measured, "a3po", "recompute")),
        "cpu_time": {
            "vcpo_over_plain": cpu(measured, "vcpo", "plain")["cpu_p50"],
            "naive_over_plain": cpu(measured, "naive", "plain")["cpu_p50"],
            "a3po_over_recompute": cpu(measured, "a3po", "recompute")["cpu_p50"],
        },
        "plain": PLAIN,
        "step_s": {name: median([row[name] for row in measured.rounds]) for name in VARIANTS},
        "tokens_per_s": {name: rate(measured, name) for name in VARIANTS},
        "peak_memory_bytes": measured.peak_bytes,
        "num_rounds": len(measured.rounds),
    }


def ratios(measured: Measured, variant: str, other: str) -> list[float]:
    return [row[variant] / row[other] for row in measured.rounds]


def cpu(measured: Measured, variant: str, other: str) -> dict[str, float]:
    return {"cpu_p50": median([row[variant] / row[other] for row in measured.cpu_rounds])}


def rate(measured: Measured, variant: str) -> float:
    return measured.num_tokens / median([row[variant] for row in measured.rounds])


def median(samples: Sequence[float]) -> float:
    return quantile(samples, 0.5)


def _ratio(
    name: str, samples: list[float], hows: tuple[str, str], target: float | None, details: dict[str, float]
) -> Figure:
    how, reference_how = hows
    return Figure(
        name=name,
        value=median(samples),
        unit="x",
        how=f"median of rounds, seconds of {how} by those of the reference",
        reference=1.0,
        reference_how=reference_how,
        target=target,
        num_samples=len(samples),
        details=spread(samples) | details,
    )
