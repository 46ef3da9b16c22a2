"""What an engine gives here: every figure of `p2prl bench rollout`. No torch.

In: which model, which engines. Out: `Figure`s; progress. The measuring itself runs in a child (`rollout_run.py`), one
engine at a time.
"""

from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from p2prl.bench.figures import Figure, spread
from p2prl.bench.processes import Processes

PLAN = "rollout.json"
LENGTHS = (16, 64, 256)
SPEED_TARGET, ESS_TARGET, LOAD_TARGET_S = 97.0, 0.999, 1.5


class Variant(msgspec.Struct, frozen=True):
    engine: str  # "transformers" or "vllm"
    dtype: str

    def __str__(self) -> str:
        return f"{self.engine}_{self.dtype}"


class Plan(msgspec.Struct, frozen=True):
    """A round: `num_batches` of `num_groups` groups, answers of at most `max_new_tokens`."""

    recipe: str
    variants: tuple[Variant, ...]
    models_cache: str
    threads: int
    num_groups: int
    num_batches: int
    max_new_tokens: int
    num_rounds: int
    num_scored: int = 32  # answers whose log-probs are compared with the learner's
    num_loads: int = 5


MODELS = {
    "builtin": Plan("addition", (Variant("transformers", "float32"),), "", 1, 8, 40, 8, 15),
    "smollm2": Plan(
        "smollm2-chain-sum",
        tuple(Variant(engine, dtype) for engine in ("transformers", "vllm") for dtype in ("float32", "bfloat16")),
        "", 1, 2, 2, 64, 3,
    ),
}  # fmt: skip


class Agreement(msgspec.Struct, frozen=True):
    """An engine's log-probs beside a learner's, over the first `length` tokens of each answer."""

    learner: str
    length: int
    mean_difference: float
    max_difference: float
    ess_ratio: float
    num_tokens: int


class Pair(msgspec.Struct, frozen=True):
    """A round: tokens a second through the worker and bare, by the clock and of CPU time."""

    ours: float
    ours_cpu: float
    bare: float
    bare_cpu: float


class Measured(msgspec.Struct, frozen=True):
    """`pairs`: tokens a second through the worker, and bare; `loads_s`: at rest; `busy_loads_s`: in mid-answer."""

    name: str
    pairs: tuple[Pair, ...]
    loads_s: tuple[float, ...]
    busy_loads_s: tuple[float, ...]
    num_lost: int
    pss_bytes: int
    agreements: tuple[Agreement, ...]
    plan: str


def measure(plan: Plan, say: Callable[[str], None]) -> dict[str, Measured]:
    """By variant; whatever happens, no process and no file is left."""
    processes = Processes()
    try:
        found = {}
        for variant in plan.variants:
            say(f"{variant}: {plan.num_rounds} rounds through the worker and bare, then loads and log-probs")
            (processes.root / PLAN).write_bytes(msgspec.json.encode(msgspec.structs.replace(plan, variants=(variant,))))
            found[str(variant)] = msgspec.convert(processes.child("p2prl.bench.rollout_run"), Measured)
        return found
    finally:
        processes.close()


def figures(plan: Plan, found: dict[str, Measured]) -> list[Figure]:
    return [figure for name, measured in found.items() for figure in _of_variant(plan, name, measured)]


def _of_variant(plan: Plan, name: str, measured: Measured) -> list[Figure]:
    ratios = [100 * pair.ours / pair.bare for pair in measured.pairs]
    return [
        Figure(
            name=f"{name}_speed",
            value=median(ratios),
            unit="% of bare",
            how=f"median of paired rounds' ratios of tokens/s: worker, pipe and engine process against the engine alone; "
            f"{plan.num_batches} batches of {plan.num_groups} groups, {plan.threads} thread; {measured.plan}",
            reference=100.0,
            reference_how="the bare engine: same prompts, sampling, seeds, threads and niceness",
            target=SPEED_TARGET,
            at_least=True,
            num_samples=len(ratios),
            details=spread(ratios)
            | {
                "tokens_per_s": median([pair.ours for pair in measured.pairs]),
                "bare_tokens_per_s": median([pair.bare for pair in measured.pairs]),
                # What the CPUs did for a token: the same on a busy machine, where the clock says little.
                "cpu_percent_of_bare": median([100 * pair.ours_cpu / pair.bare_cpu for pair in measured.pairs]),
            },
        ),
        *_loads(name, measured),
        Figure(
            name=f"{name}_memory",
            value=measured.pss_bytes / 1e6,
            unit="MB",
            how="PSS of the engine process and all it started, after generating",
        ),
        *[_agreement(name, agreement) for agreement in measured.agreements],
    ]


def _loads(name: str, measured: Measured) -> list[Figure]:
    target = LOAD_TARGET_S if name.startswith("vllm") else None
    lost = f"{measured.num_lost} answers in work were lost" if measured.num_lost else ""
    how = "median, from the request until the engine says that it draws from the new weights"
    samples: Sequence[tuple[str, Sequence[float], str, str]] = (
        ("load", measured.loads_s, "at rest", ""),
        ("load_in_answer", measured.busy_loads_s, "while it generates; no answer in work may be lost", lost),
    )
    return [
        Figure(
            name=f"{name}_{kind}", value=median(seconds), unit="s", how=f"{how}, {when}", target=target,
            num_samples=len(seconds), details=spread(seconds), broken=broken,
        )
        for kind, seconds, when, broken in samples
        if seconds
    ]  # fmt: skip


def _agreement(name: str, agreement: Agreement) -> Figure:
    exact = name == "transformers_float32" and agreement.learner == "float32"
    return Figure(
        name=f"{name}_ess_{agreement.learner}_{agreement.length}",
        value=agreement.ess_ratio,
        unit="ESS ratio",
        how=f"at age 0, of weights exp(sum of log-prob differences) over the first {agreement.length} tokens of each "
        f"answer; learner in {agreement.learner}",
        target=ESS_TARGET if exact else None,
        at_least=True,
        num_samples=agreement.num_tokens,
        details={"mean_difference": agreement.mean_difference, "max_difference": agreement.max_difference},
    )
