"""Make the built-in policy's warm-started weights from a seed: `python -m p2prl.bench.warm_start --out FILE`.

In: seed, target reward. Out: a bf16 state file for `p2prl/models/builtin_weights/`.

It joins two rooms that don't know each other (environments, models), hence its place.
"""

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Supervised steps on two-digit addition, up to a sampled reward.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.75, help="sampled reward at temperature 1 to stop at")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)

    import torch

    from p2prl.environments.registry import HELD_OUT_FROM, load_environment
    from p2prl.models.tensors import write_state
    from p2prl.models.warm_start import Task, WarmStart, make_warm_start

    torch.set_num_threads(1)  # the order of sums, and so the file, depends on it
    task: Task = load_environment("addition", {})  # pyright: ignore[reportAssignmentType]
    plan = WarmStart(seed=options.seed, target=options.target, measure_from=HELD_OUT_FROM)
    model = make_warm_start(task, plan, lambda line: print(line, file=sys.stderr, flush=True))
    print(write_state(model, options.out).hex())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
