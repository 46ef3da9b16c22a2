"""The golden hashes of reasoning-gym's prompts, and how to make them again after a change on purpose:

    PYTHONHASHSEED=0 python -m tests.prompt_hashes > tests/vectors/prompts.json

Two training prompts and a held-out one of every data set, with an answer's reward. It needs reasoning-gym alone, so any
Python can compare: PYTHONHASHSEED=0 PYTHONPATH=. python3.13 -m tests.prompt_hashes | diff - tests/vectors/prompts.json
"""

import json
import sys
import warnings
from collections.abc import Iterable
from contextlib import redirect_stdout
from hashlib import blake2b

from p2prl.environments.reasoning_gym import ReasoningGym, load_dataset
from p2prl.environments.registry import HELD_OUT_FROM, package_version

INDICES = (0, 1, HELD_OUT_FROM)
COMPOSITE = {"datasets": [{"name": name, "weight": 1.0, "config": {}} for name in ("chain_sum", "leg_counting")]}


def hashes(names: Iterable[str]) -> dict[str, list[str]]:
    found = {}
    for name in names:
        environment = load_dataset(name, COMPOSITE if name == "composite" else {})
        lines = [environment.prompt(index) + worth(environment, index) for index in INDICES]
        found[name] = [blake2b(line.encode("utf-8", "replace"), digest_size=8).hexdigest() for line in lines]
    return found


def worth(environment: ReasoningGym, index: int) -> str:
    try:
        return repr(environment.reward(index, "7")[0])
    except Exception as error:  # noqa: BLE001  # some raise on such an answer: the judge makes that 0
        return type(error).__name__


def main() -> int:
    from reasoning_gym.factory import DATASETS

    warnings.simplefilter("ignore")
    with redirect_stdout(sys.stderr):  # some print
        found = {"package": package_version("reasoning-gym"), "datasets": hashes(sorted(DATASETS))}
    print(json.dumps(found, indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
