"""How a process ended, in words.

In: an exit code as `subprocess` gives it, negative for a signal. Out: a phrase that says what it means.
"""

import signal

KILLED = "killed: most likely the machine ran out of memory"
MEANINGS = {
    "SIGKILL": KILLED,
    "SIGXCPU": "it used more of the processor than it may",
    "SIGPROF": "it used more of the processor than it may, in code that nothing can interrupt",
    "SIGALRM": "it ran longer than it may, and went on when told to stop",
    "SIGXFSZ": "it wrote a larger file than it may",
    "SIGSEGV": "compiled code in it crashed",
    "SIGBUS": "compiled code in it crashed, or a file it had mapped was cut short",
    "SIGILL": "compiled code in it is made for another processor",
    "SIGABRT": "compiled code in it gave up",
    "SIGSYS": "it made a system call that it may not",
    "SIGTERM": "it was told to stop",
    "SIGINT": "it was interrupted",
}


def describe_exit(code: int) -> str:
    """`code` -9 and the like are signals."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    meaning = MEANINGS.get(name, "")
    if meaning == KILLED:
        return KILLED
    return f"ended by {name}: {meaning}" if meaning else f"ended by {name}"
