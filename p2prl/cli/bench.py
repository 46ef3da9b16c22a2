"""`p2prl bench NAME`: measure this machine and this code.

In: a benchmark's name. Out: that command, imported when it is used; one that is not built is not listed.
"""

import importlib

import click

BENCHMARKS = {
    "node": "p2prl.cli.bench_node:node",
    "rollout": "p2prl.cli.bench_rollout:rollout",
    "staleness": "p2prl.cli.bench_staleness:staleness",
    "step": "p2prl.cli.bench_step:step",
    "weights": "p2prl.cli.bench_weights:weights",
}
# What --help says, so that it imports no benchmark.
SUMMARIES = {
    "node": "How fast a node is: commands, join, gossip, event loop, generation, idle cost.",
    "rollout": "What the engines give: speed, agreement with the learner, loads, memory.",
    "staleness": "Which objective survives samplers that lag: trains the built-in policy.",
    "step": "What an optimiser step costs by its objective, on the built-in policy and SmolLM2.",
    "weights": "How small a version's delta is, and how fast it is made and applied.",
}


class LazyBenchmarks(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BENCHMARKS:
            return None
        module, _, function = BENCHMARKS[cmd_name].partition(":")
        return getattr(importlib.import_module(module), function)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            formatter.write_dl([(name, SUMMARIES[name]) for name in self.list_commands(ctx)])


@click.group(cls=LazyBenchmarks)
def bench() -> None:
    """Measure this machine and this code. A figure stands beside its reference from the same run."""
