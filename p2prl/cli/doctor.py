"""`p2prl doctor`: what is wrong on this machine and what to do.

In: checks of this machine, and the daemon's own report where one runs. Out: a line each; exit 6 when something fails,
4 with --check when something is worth a warning.
"""

import os
import platform
import shutil
import socket
import sys
from pathlib import Path

import click

from p2prl.cli.client import Daemon, decode
from p2prl.cli.places import installed
from p2prl.cli.reading import home_of, print_json, reading, wants_json
from p2prl.cli.render import plain
from p2prl.errors import ConfigError, NoDaemon
from p2prl.paths import Home
from p2prl.status import Check, DoctorReport

UNHEALTHY = 4
FAILED = 6
PYTHONS = ((3, 11), (3, 14))
LOW_DISK_BYTES = 2 * 10**9
FULL_DISK_BYTES = 200 * 10**6
LOW_FILES = 1024


@click.command()
@click.option("--check", is_flag=True, help="Exit with 4 when there are warnings.")
@reading
def doctor(ctx: click.Context, check: bool, as_json: bool) -> None:
    """What is wrong on this machine and what to do."""
    home = home_of(ctx)
    try:
        theirs = decode(Daemon.find(home).post("/api/v1/doctor"), DoctorReport)
        ports = ("swarm.port", "web.port")  # the daemon has them
        report = DoctorReport(checks=(*(each for each in local_checks(home) if each.name not in ports), *theirs.checks))
    except NoDaemon:
        report = DoctorReport(checks=local_checks(home))
    if wants_json(ctx, as_json):
        print_json(report)
    else:
        for each in report.checks:
            fix = f". {plain_line(each.fix)}" if each.fix else ""
            click.echo(f"{plain(each.level):<5} {plain(each.name)}: {plain_line(each.message)}{fix}")
    if report.worst == "fail":
        ctx.exit(FAILED)
    if check and report.worst == "warn":
        ctx.exit(UNHEALTHY)


def plain_line(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def local_checks(home: Home) -> tuple[Check, ...]:
    """Everything that can be seen without a daemon; a daemon that would not start shows why here."""
    checks = [_python(), _packages(), _gpu(), _disk(home), _folders(home), _files(), _identity(home)]
    return (*checks, *_config(home))


def _python() -> Check:
    running = sys.version_info[:2]
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if PYTHONS[0] <= running < PYTHONS[1]:
        return Check(name="python", message=text)
    return Check(level="fail", name="python", message=text, fix="Use Python 3.11, 3.12 or 3.13")


def _packages() -> Check:
    missing = [name for name in ("torch", "transformers", "hivemind") if not installed(name)]
    if missing:
        fix = "Install p2prl again: pip install p2prl"
        return Check(level="fail", name="packages", message=f"not installed: {', '.join(missing)}", fix=fix)
    text = ", ".join(f"{name} {installed(name)}" for name in ("torch", "transformers", "hivemind"))
    return Check(name="packages", message=text)


def _gpu() -> Check:
    """Without torch, which takes seconds: what the NVIDIA driver shows."""
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    if found:
        return Check(name="gpu", message=f"{len(found)} NVIDIA, used when the installed torch is a CUDA build")
    return Check(name="gpu", message="none seen: the CPU generates and trains")


def _disk(home: Home) -> Check:
    folder = home.cache
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free at {home.cache}"
    if free < FULL_DISK_BYTES:
        return Check(level="fail", name="disk", message=text, fix=f"Free {FULL_DISK_BYTES / 1e6:.0f} MB at least")
    if free < LOW_DISK_BYTES:
        return Check(
            level="warn", name="disk", message=text, fix="Weights and checkpoints may not fit; free some space"
        )
    return Check(name="disk", message=text)


def _folders(home: Home) -> Check:
    if not home.state.exists():
        return Check(name="home", message=f"{home.state} will be made by the first run")
    if not os.access(home.state, os.W_OK | os.X_OK):
        return Check(level="fail", name="home", message=f"can't write to {home.state}", fix="Give this user the folder")
    if home.state.stat().st_mode & 0o077:
        text = f"others can look into {home.state}"
        return Check(level="warn", name="home", message=text, fix=f"Run: chmod 700 {home.state}")
    return Check(name="home", message=str(home.state))


def _files() -> Check:
    try:
        import resource
    except ImportError:  # not on Windows
        return Check(name="open files", message="no limit known")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LOW_FILES:
        text = f"at most {soft}"
        return Check(level="warn", name="open files", message=text, fix=f"Many peers need more: ulimit -n {LOW_FILES}")
    return Check(name="open files", message=f"at most {soft}")


def _identity(home: Home) -> Check:
    if not home.identity.exists():
        return Check(name="identity", message="will be made by the first run")
    from p2prl.identity import Identity

    try:
        identity = Identity.load(home.identity)
    except ConfigError as error:
        return Check(level="fail", name="identity", message=str(error))
    return Check(name="identity", message=f"{identity.peer_id} ({identity.name})")


def _config(home: Home) -> list[Check]:
    from p2prl import config

    try:
        loaded, _ = config.load(home.config_file, os.environ)
    except ConfigError as error:
        return [Check(level="fail", name="config", message=str(error))]
    found = [Check(name="config", message=str(home.config_file) if home.config_file.exists() else "defaults")]
    found.append(_port("swarm.port", loaded.swarm.host, loaded.swarm.port))
    found.append(_port("web.port", loaded.web.host, loaded.web.port))
    return found


def _port(key: str, host: str, port: int) -> Check:
    if port == 0:
        return Check(name=key, message="any free port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            text = f"port {port} of {host} can't be used: {error.strerror}"
            fix = f"Stop the program that has it, or set {key} to another"
            return Check(level="fail", name=key, message=text, fix=fix)
    return Check(name=key, message=f"port {port} of {host} is free")
