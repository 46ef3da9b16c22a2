"""The environment process: prompts and rewards, away from the daemon's loop and memory.

In: an inherited socket, a model source (for its tokenizer), what the recipe says of the environment. Out: `Ready` or
`Failed`, then replies. Started with PYTHONHASHSEED=0, without which some data sets give other prompts on each machine:

    python -m p2prl.node.environment_process FD SOURCE CACHE SPEC_JSON [STOP_STRINGS_JSON]
"""

import os
import signal
import sys
from pathlib import Path

import msgspec

from p2prl.environments.judge import Judge
from p2prl.environments.messages import Failed, Ready, Request
from p2prl.environments.rewarder import LimitGuard, Limits, serve
from p2prl.environments.spec import decode, open_environment
from p2prl.errors import P2prlError
from p2prl.models.load import load_tokenizer
from p2prl.models.stop_strings import StopStrings
from p2prl.pipes import BlockingPipe, PipeClosed


def main(fd: int, source: str, cache: Path, spec_json: str, stop_json: str = "[]") -> int:
    """Serve until the daemon closes the pipe; 1 when it could not start (`Failed` says why)."""
    # Ctrl-C reaches the whole group; the daemon drains, then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe: BlockingPipe[Request] = BlockingPipe.inherited(fd, Request)
    try:
        try:
            judge, ready = _start(source, cache, spec_json, stop_json)
        except (P2prlError, ImportError, OSError) as error:
            pipe.send(Failed(str(error)))
            return 1
        pipe.send(ready)
    except PipeClosed:
        return 0
    serve(judge, pipe)
    return 0


def _start(source: str, cache: Path, spec_json: str, stop_json: str) -> tuple[Judge, Ready]:
    if os.environ.get("PYTHONHASHSEED") != "0":
        raise P2prlError(
            "the environment process was started without PYTHONHASHSEED=0: its rewards could differ; set it"
        )
    spec = decode(spec_json)
    environment = open_environment(spec)
    tokenizer = load_tokenizer(source, cache)
    stop = msgspec.json.decode(stop_json, type=tuple[str, ...])
    stops = StopStrings(stop, tokenizer.decode, tokenizer.stop_ids) if stop else None
    guard = LimitGuard(Limits())
    judge = Judge(environment, tokenizer, guard, stops, spec.rules, guard.within)
    judge.prompt(0)  # a model that can't read the environment's prompts is found now
    if spec.rules.max_turns > 1:
        tokenizer.encode_turn("1", tokenizer.stop_ids[0])  # and one whose template takes no second turn
    ready = Ready(
        tokenizer.hash, environment.version, environment.num_prompts, tuple(tokenizer.stop_ids), tokenizer.pad_id
    )
    return judge, ready


if __name__ == "__main__":
    descriptor, model_source, cache_folder, *rest = sys.argv[1:]
    raise SystemExit(main(int(descriptor), model_source, Path(cache_folder), *rest))
