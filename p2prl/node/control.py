"""What the page and the command line may ask of the node.

In: requests from `web/`. Out: peers, series, logs, the doctor's report; a stop that begins to drain.
"""

from collections.abc import Callable

from p2prl import status
from p2prl.logs import LogLine, Logs
from p2prl.node.snapshot import peer_rows, weights_report
from p2prl.node.state import NodeState
from p2prl.node.supervisor import Supervisor
from p2prl.web.series import Series

TRAINING_NAMES = (
    "loss",
    "ess_ratio",
    "ess_ratio_weights",
    "weight_top_share",
    "lr_multiplier",
    "grad_norm",
    "kl",
    "entropy",
    "clip_fraction",
    "clip_fraction_fresh",
    "log_ratio_mean",
    "age_mean",
)


class Control:
    def __init__(self, state: NodeState, supervisor: Supervisor, stop: Callable[[float], None]) -> None:
        self._state, self._supervisor, self._stop = state, supervisor, stop
        self._series = Series()
        self.logs_source: Logs | None = None
        self.origins: dict[str, str] = {}

    def stop(self, timeout_s: float) -> None:
        self._stop(timeout_s)

    def peers(self) -> list[status.PeerRow]:
        return peer_rows(self._state)

    def weights(self) -> status.WeightsReport:
        return weights_report(self._state)

    def record(self, snapshot: status.Status) -> None:
        """One row of the plots."""
        training = snapshot.training
        values: dict[str, float] = {
            "tokens_per_s": snapshot.rates.rollout_tokens_per_s,
            "version": float(training.step),
            "up_bytes_per_s": snapshot.rates.up_bytes_per_s,
            "down_bytes_per_s": snapshot.rates.down_bytes_per_s,
            "peers": float(snapshot.swarm.peers_alive),
            "staleness_p50": snapshot.policy.staleness_p50,
            "staleness_p95": snapshot.policy.staleness_p95,
        }
        for name, value in (("reward", training.reward_mean), ("eval_reward", training.eval_reward)):
            if value is not None:
                values[name] = value
        values.update({name: training.last[name] for name in TRAINING_NAMES if name in training.last})
        self._series.record(self._state.clock.unix(), values)

    def series(self, names: tuple[str, ...], since_s: float, points: int) -> dict[str, list[float | None]]:
        return self._series.columns(names, self._state.clock.unix() - since_s, points)

    def logs(self, level: str, component: str, since_s: float, limit: int) -> list[LogLine]:
        return self.logs_source.tail(level, component, since_s, limit) if self.logs_source is not None else []

    def config(self) -> list[status.ConfigValue]:
        values = self._state.config.model_dump(mode="json")
        return [
            status.ConfigValue(
                key=f"{section}.{key}", value=value, origin=self.origins.get(f"{section}.{key}", "default")
            )
            for section, entries in values.items()
            for key, value in entries.items()
        ]

    def recipe(self) -> dict[str, object]:
        return self._state.recipe.model_dump(mode="json", by_alias=True)

    async def doctor(self) -> status.DoctorReport:
        checks = [
            status.Check(level="warn" if item[0] == "warning" else "fail", name=code, message=item[1], fix=item[2])
            for code, item in sorted(self._state.health.items())
        ]
        checks += [
            status.Check(level="warn", name=f"loop {name}", message=health.error, fix="see p2prl logs --level error")
            for name, health in self._supervisor.health.items()
            if not health.ok
        ]
        connected = len(await self._state.transport.peers())
        checks.append(status.Check(name="peers", message=f"connected to {connected} peers"))
        return status.DoctorReport(checks=tuple(checks))
