"""Prepares a model's version 0 in a child, so that transformers never enters the daemon.

In: source, cache folder; the recipe as JSON where its objective is to be tried too, which needs torch. Out: one JSON
line {"weights", "hash"} or {"error"}; progress on stderr.

    python -m p2prl.node.prepare_process SOURCE CACHE [RECIPE]
"""

import json
import sys
from pathlib import Path

from p2prl.errors import P2prlError
from p2prl.models.load import prepare
from p2prl.recipe import Recipe


def main(source: str, cache: Path, recipe: str = "") -> int:
    try:
        if recipe:
            from p2prl.learner.objective_options import check_objective

            check_objective(Recipe.model_validate_json(recipe))
        files = prepare(source, cache, lambda text: print(text, file=sys.stderr, flush=True))
    except P2prlError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps({"weights": str(files.weights), "hash": files.hash.hex()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
