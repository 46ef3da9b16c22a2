"""What the page and the control API may ask of a node. `node/` implements it; `web/` knows nothing else of the node."""

from typing import Protocol

from p2prl.logs import LogLine
from p2prl.status import ConfigValue, DoctorReport, PeerRow, WeightsReport

Columns = dict[str, list[float | None]]


class Commands(Protocol):
    def stop(self, timeout_s: float) -> None:
        """Begin to drain, at most `timeout_s`; returns at once."""
        ...

    def peers(self) -> list[PeerRow]: ...

    def weights(self) -> WeightsReport: ...

    def series(self, names: tuple[str, ...], since_s: float, points: int) -> Columns:
        """Columns of equal length: "t" (unix seconds) and each known name, at most `points` rows."""
        ...

    def logs(self, level: str, component: str, since_s: float, limit: int) -> list[LogLine]: ...

    def config(self) -> list[ConfigValue]: ...

    def recipe(self) -> dict[str, object]:
        """The recipe's resolved values by section, as JSON types."""
        ...

    async def doctor(self) -> DoctorReport: ...
