"""The model inside vLLM's scheduler process, which ends with the engine process, however that ends.

In: what vLLM gives its executors. Out: one process instead of two, without shared memory between them. Linux alone.

vLLM names this class by its path and makes it in its own process. That one notices nothing when the engine process is
killed: it would stay for good, with some 2 GB.
"""

import ctypes
import multiprocessing
import os
import signal

from vllm.v1.executor.uniproc_executor import UniProcExecutor  # pyright: ignore[reportMissingImports]

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class OneProcess(UniProcExecutor):
    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


def end_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends; at once where it has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)
