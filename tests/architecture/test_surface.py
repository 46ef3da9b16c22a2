"""Commands, keys, routes, series, fields and codes are what scripts, dashboards and older peers rely on.

A change on purpose: `python -m tests.architecture.surface`, and say it in the commit. Wire fields are only added at the
end.
"""

import json

import pytest

from tests.architecture.surface import LIST, surface

FROZEN = json.loads(LIST.read_text())


@pytest.mark.parametrize("part", sorted(FROZEN))
def test_the_surface_is_the_one_that_was_agreed(part: str) -> None:
    assert surface()[part] == FROZEN[part], "on purpose? then: python -m tests.architecture.surface"


def test_no_part_is_missing() -> None:
    assert sorted(surface()) == sorted(FROZEN)
