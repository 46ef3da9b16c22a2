"""A worker of the staleness study: runs, one after another, on one thread.

In: an inherited socket; `Setup`, then `Job`s. Out: `Ready` or `Failed`, then for each job a word a tick and `Done`. It
ends when the parent closes the pipe, and so within a tick of the parent's death:

    python -m p2prl.bench.staleness_worker FD
"""

import gc
import signal
import sys
import time
import warnings

from p2prl.bench.staleness import Done, Failed, Job, Progress, Ready, Reply, Request, RunSpec, Setup, recipe_of
from p2prl.errors import P2prlError
from p2prl.pipes import BlockingPipe, PipeClosed

TERMINATED = 143


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes the pipe
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # not death, so that the folder of a run goes
    pipe: BlockingPipe[Request] = BlockingPipe.inherited(fd, Request)
    try:
        while True:
            pipe.send(_reply(pipe, pipe.receive()))
    except PipeClosed:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no folder is left, and Python's own end takes a while


def _reply(pipe: BlockingPipe[Request], request: Request) -> Reply:
    try:
        match request:
            case Setup(specs):
                return _prepare(specs)
            case Job(spec):
                return _run(pipe, spec)
    except PipeClosed:
        raise
    # RuntimeError is also how torch says that memory ran out.
    except (P2prlError, ValueError, OSError, RuntimeError, ImportError) as error:
        return Failed(str(error))
    except MemoryError:
        return Failed("the memory ran out; use fewer workers")


def _prepare(specs: tuple[RunSpec, ...]) -> Ready:
    from p2prl.learner.objective_options import check_objective

    for spec in specs:
        check_objective(recipe_of(spec))
    warnings.simplefilter("ignore")  # many runs, one terminal; what matters is in the results
    gc.collect()
    gc.freeze()  # the libraries' objects stay: looking through them again costs a tenth of a run
    return Ready()


def _run(pipe: BlockingPipe[Request], spec: RunSpec) -> Done:
    from p2prl.bench.staleness_run import run

    started = time.monotonic()
    result, trace = run(spec, lambda num_ticks: pipe.send(Progress(num_ticks)))
    return Done(result, trace, time.monotonic() - started)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
