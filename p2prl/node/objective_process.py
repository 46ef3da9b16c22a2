"""Tries a recipe's objective in a child, so that torch never enters the command line.

In: the recipe as JSON. Out: one JSON line, {} or {"error"}.

    python -m p2prl.node.objective_process RECIPE
"""

import json
import sys

from p2prl.errors import ConfigError
from p2prl.learner.objective_options import check_objective
from p2prl.recipe import Recipe


def main(recipe: str) -> int:
    try:
        check_objective(Recipe.model_validate_json(recipe))
    except ConfigError as error:
        print(json.dumps({"error": str(error)}))
        return ConfigError.exit_code
    print("{}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
