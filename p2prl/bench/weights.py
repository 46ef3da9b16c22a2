"""How small a version's delta is and how fast it is made and applied: figures of `p2prl bench weights`. No torch.

In: a plan. Out: the pairs of the measured steps, their figures, the report's section `codec`.

A child trains the model with real optimiser steps and measures each pair of neighbouring states (`deltas`). The first
steps after a start flatter: the float32 masters lie on bf16 values then, and must move half a last bit before anything
changes; so the last steps count.

Invariant: a ratio of seconds is the median of ratios within a step, so that a busy machine slows both sides.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from p2prl.bench.deltas import SCHEMES, Pair
from p2prl.bench.figures import Figure, quantile, spread
from p2prl.bench.processes import Processes

PLAN = "weights.json"
TARGETS = {1e-6: 0.40, 1e-5: 1.0}  # per cent of the full size
PUBLISHED = "PULSE's scheme as its paper describes it (arXiv 2602.03839), on the same states"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the measuring child is told. Steps `first_step` to `num_steps` are measured."""

    recipe: str = "smollm2-chain-sum"
    rates: tuple[float, ...] = (1e-6, 1e-5)
    num_steps: int = 30
    first_step: int = 20
    num_groups: int = 2
    answer_tokens: int = 24
    micro_batch_tokens: int = 1024
    threads: int = 1
    models_cache: str = ""


QUICK = Plan(num_steps=5, first_step=4)


def measure(plan: Plan, say: Callable[[str], None]) -> list[Pair]:
    """Whatever happens, no process and no file is left."""
    processes = Processes()
    try:
        rates = ", ".join(f"{rate:g}" for rate in plan.rates)
        say(f"codec: {plan.num_steps} optimiser steps of {plan.recipe} at each rate of {rates}")
        (processes.root / PLAN).write_bytes(msgspec.json.encode(plan))
        return msgspec.convert(processes.child("p2prl.bench.weights_run"), list[Pair])
    finally:
        processes.close()


def figures(plan: Plan, pairs: Sequence[Pair]) -> list[Figure]:
    """Sizes have targets when the steps are those that the targets are for."""
    settled = (plan.num_steps, plan.first_step) == (Plan().num_steps, Plan().first_step)
    steps = f"steps {plan.first_step} to {plan.num_steps} of {plan.recipe}"
    found = []
    for rate in plan.rates:
        of_rate = [pair for pair in pairs if pair.rate == rate]
        section = _of_rate(of_rate)
        found.append(
            Figure(
                name=f"delta_share_{rate:g}",
                value=section["delta_share"] * 100,
                unit="%",
                how=f"mean bytes of a delta by those of the bf16 state at learning rate {rate:g}; {steps}",
                reference=section["pulse_share"] * 100,
                reference_how=PUBLISHED,
                target=TARGETS.get(rate) if settled else None,
                num_samples=len(of_rate),
                details={name: section[name] for name in ("zstd_share", "xor_zstd_share", "changed", "bits_a_change")},
            )
        )
        for name, done in (("encode", "delta"), ("apply", "apply")):
            samples = _ratios(of_rate, done)
            found.append(
                Figure(
                    name=f"{name}_over_zstd_{rate:g}",
                    value=quantile(samples, 0.5),
                    unit="x",
                    how=f"median of steps, seconds of {name} (hashes and checks included) by the reference's; {steps}, "
                    f"learning rate {rate:g}, {plan.threads} threads",
                    reference=1.0,
                    reference_how="zstd -3 of the whole state file, with as many threads",
                    target=1.0,
                    num_samples=len(samples),
                    details=spread(samples) | {"cpu_p50": section[f"{name}_over_zstd_cpu"]},
                )
            )
    return found


def short(plan: Plan, pairs: Sequence[Pair]) -> dict[str, Any]:
    """The report's section `codec`: the figures under plain names, by learning rate."""
    by_rate = {f"{rate:g}": _of_rate([pair for pair in pairs if pair.rate == rate]) for rate in plan.rates}
    return {
        "recipe": plan.recipe,
        "steps": [plan.first_step, plan.num_steps],
        "threads": plan.threads,
        "rates": by_rate,
    }


def _of_rate(pairs: Sequence[Pair]) -> dict[str, float]:
    shares = {f"{name}_share": _mean([pair.num_bytes[name] / pair.full_bytes for pair in pairs]) for name in SCHEMES}
    seconds = {f"{name}_s": _median([pair.wall_s[name] for pair in pairs]) for name in (*SCHEMES, "apply")}
    return {
        **shares,
        "changed": _mean([pair.num_changed / pair.num_parameters for pair in pairs]),
        "bits_a_change": _mean([8 * pair.num_bytes["delta"] / max(pair.num_changed, 1) for pair in pairs]),
        "encode_over_zstd": _median(_ratios(pairs, "delta")),
        "apply_over_zstd": _median(_ratios(pairs, "apply")),
        "encode_over_zstd_cpu": _median([pair.cpu_s["delta"] / pair.cpu_s["zstd"] for pair in pairs]),
        "apply_over_zstd_cpu": _median([pair.cpu_s["apply"] / pair.cpu_s["zstd"] for pair in pairs]),
        **seconds,
    }


def _ratios(pairs: Sequence[Pair], name: str) -> list[float]:
    return [pair.wall_s[name] / pair.wall_s["zstd"] for pair in pairs]


def _mean(samples: Sequence[float]) -> float:
    return sum(samples) / len(samples)


def _median(samples: Sequence[float]) -> float:
    return quantile(samples, 0.5)
