"""The `p2prl` command: a group whose commands are imported when they are used.

In: arguments. Out: text on stdout, `error: ...` on stderr, the exit codes below.

Reading commands load neither torch nor hivemind nor pydantic; a test holds the budget. A command whose file is not built
is not shown. No `auto_envvar_prefix`: it would claim names that belong to the configuration.
"""

import errno
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from p2prl import __version__
from p2prl.errors import P2prlError

COMMANDS = {
    "init": "p2prl.cli.init:init",
    "run": "p2prl.cli.run:run",
    "demo": "p2prl.cli.demo:demo",
    "status": "p2prl.cli.status:status",
    "peers": "p2prl.cli.peers:peers",
    "logs": "p2prl.cli.logs:logs",
    "stop": "p2prl.cli.stop:stop",
    "export": "p2prl.cli.export:export",
    "weights": "p2prl.cli.weights:weights",
    "doctor": "p2prl.cli.doctor:doctor",
    "web": "p2prl.cli.web:web",
    "invite": "p2prl.cli.invite:invite",
    "env": "p2prl.cli.env:env",
    "generate": "p2prl.cli.generate:generate",
    "recipe": "p2prl.cli.recipe:recipe",
    "id": "p2prl.cli.identity:show",
    "config": "p2prl.cli.config:config",
    "paths": "p2prl.cli.places:paths",
    "version": "p2prl.cli.places:version",
    "bench": "p2prl.cli.bench:bench",
}
# What --help says, so that it imports no command.
SUMMARIES = {
    "init": "Make a home: identity, token, configuration.",
    "run": "Run a node: join a swarm, generate, train, serve.",
    "demo": "A local swarm that learns while you watch.",
    "status": "What this node is doing, in one screen.",
    "peers": "The peers this node knows.",
    "logs": "The newest log lines; -f follows.",
    "stop": "Finish what runs, hand over, stop.",
    "export": "A version as a Hugging Face folder.",
    "weights": "Which versions lie here; check them, tidy up.",
    "doctor": "What is wrong on this machine and what to do.",
    "web": "Open this node's page, logged in.",
    "invite": "What others need to join this swarm.",
    "env": "Tasks: what there is, what they ask, what an answer is worth.",
    "generate": "Answer a recipe's prompts here, and show what that is worth.",
    "recipe": "Recipes: make, check, show; a recipe's swarm id.",
    "id": "This node's peer id and name.",
    "config": "The configuration and where each value comes from.",
    "paths": "Where this node keeps its things.",
    "version": "Versions of p2prl and what it stands on.",
    "bench": "Measure this machine and this code.",
}
EXIT_CODES = """\b
Exit codes:
  0 ok                      5 refused (token, permission)
  1 failed                  6 this machine can't run it now
  2 usage or config error   7 another daemon holds this home
  3 no daemon running       75 swarm unreachable, try again
  4 running but unhealthy   130 interrupted"""
INTERRUPTED, PREFLIGHT, REFUSED = 130, 6, 5


@dataclass(frozen=True)
class Invocation:
    """The global options, as `ctx.obj`."""

    home: str | None = None
    verbosity: int = 0
    json: bool = False
    color: bool = True


class LazyGroup(click.Group):
    """Finds commands by name in COMMANDS; turns errors of ours into a line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if built(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS or not built(cmd_name):
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        return getattr(importlib.import_module(module), function)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUMMARIES[name]) for name in self.list_commands(ctx)])

    def main(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        try:
            code = super().main(args, prog_name or "p2prl", standalone_mode=False, **_without(extra, "standalone_mode"))
            sys.exit(code if isinstance(code, int) else 0)
        except click.Abort:
            sys.exit(INTERRUPTED)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except P2prlError as error:
            click.echo(f"error: {_plain(str(error))}", err=True)
            sys.exit(error.exit_code)
        except BrokenPipeError:  # `p2prl logs | head`: not our failure; keep the interpreter's last flush quiet
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                what = f"can't use {error.filename or 'a file'}: {error.strerror}"
                click.echo(f"error: {_plain(what)}. Is it another user's, or on a disk that is read-only?", err=True)
                sys.exit(REFUSED)
            if error.errno != errno.ENOSPC:
                raise
            click.echo(
                f"error: the disk is full ({error.filename or error}). Free some space, then try again", err=True
            )
            sys.exit(PREFLIGHT)


def built(name: str) -> bool:
    return importlib.util.find_spec(COMMANDS[name].partition(":")[0]) is not None


def _without(extra: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name != key}


def _plain(text: str) -> str:
    """Error texts may hold a peer's words: no control characters but newlines reach the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


@click.group(cls=LazyGroup, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--home", envvar="P2PRL_HOME", metavar="DIR", help="Keep everything of this node in one folder.")
@click.option("-v", "--verbose", count=True, help="Say more.")
@click.option("-q", "--quiet", count=True, help="Say less.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text, where a command reads something.")
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR and TERM=dumb).")
@click.version_option(__version__, prog_name="p2prl")
@click.pass_context
def group(ctx: click.Context, home: str | None, verbose: int, quiet: int, as_json: bool, no_color: bool) -> None:
    """Reinforcement-learning post-training of language models by a swarm of volunteers' machines."""
    plain = no_color or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    ctx.obj = Invocation(home, verbose - quiet, as_json, not plain)
    if plain:
        ctx.color = False


def main() -> NoReturn:
    """The entry point of the package."""
    group.main()
