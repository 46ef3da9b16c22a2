"""A step's report as a manifest."""

import math

from p2prl.records import StepReport, Version
from p2prl.weights.publish import Parent, Trained, make_manifest
from tests import factories


def test_what_a_step_measured_travels_but_for_what_is_no_number() -> None:
    report = StepReport(Version(1, 1, b"v" * 32), "", (factories.anchor(1),), 1.0, {}, 1, 1, 1.0, ())
    report.metrics.update(loss=0.5, kl=math.nan, ratio=math.inf)
    parent = Parent(Version(0, 0, bytes(32)), bytes(32), 3)
    made = make_manifest(report, parent, "me", [Trained(b"g" * 32, 0.5, 8)], (), factories.NOW)
    assert made.metrics == {"loss": 0.5} and (made.num_groups, made.version) == (4, report.version)
