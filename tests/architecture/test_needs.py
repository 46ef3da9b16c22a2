"""A test that can't run here is skipped; where all must run it fails, but for what the machine can't have."""

import pytest

from tests.conftest import check_needs


def test_what_is_missing_fails_where_all_must_run_but_for_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is skipped here: that check_needs would skip is what is tested.
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("ALL_TESTS_MUST_RUN", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install iproute2"):
        check_needs("ip")
    monkeypatch.setenv("ALL_TESTS_MUST_RUN", "1")
    monkeypatch.setenv("BUT_FOR", "vllm")
    with pytest.raises(pytest.fail.Exception, match="apt-get install iproute2"):
        check_needs("ip")
    monkeypatch.setenv("BUT_FOR", "vllm ip")
    with pytest.raises(pytest.skip.Exception):
        check_needs("ip")
