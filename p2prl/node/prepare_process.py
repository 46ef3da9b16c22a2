"""Prepares a model's version 0 in a child, so that transformers never enters the daemon.

In: source, cache folder. Out: one JSON line {"weights", "hash"} or {"error"}; progress on stderr.

    python -m p2prl.node.prepare_process SOURCE CACHE
"""

import json
import sys
from pathlib import Path

from p2prl.errors import P2prlError
from p2prl.models.load import prepare


def main(source: str, cache: Path) -> int:
    try:
        files = prepare(source, cache, lambda text: print(text, file=sys.stderr, flush=True))
    except P2prlError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps({"weights": str(files.weights), "hash": files.hash.hex()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
