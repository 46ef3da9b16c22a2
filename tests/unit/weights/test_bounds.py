"""What a version may weigh: exactly what the recipe makes of the base, and a header."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.models.builtin import WEIGHTS
from p2prl.models.lora_rule import Lora
from p2prl.models.state import Payload, open_state, write_payloads
from p2prl.weights.bounds import SLACK_BYTES, most_bytes


def write(path: Path, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    payloads = []
    for name, shape in shapes:
        num_bytes = 2
        for side in shape:
            num_bytes *= side
        payloads.append(Payload(name, shape, lambda num_bytes=num_bytes: memoryview(bytes(num_bytes))))
    write_payloads(path, payloads)
    return path.stat().st_size


def test_a_full_state_fits_and_little_more_does() -> None:
    size = WEIGHTS.stat().st_size
    with open_state(WEIGHTS) as (places, _):
        num_tensors = len(places)
    assert size <= most_bytes(WEIGHTS, None) <= size + SLACK_BYTES + 512 * num_tensors


@pytest.mark.parametrize("rank", [1, 8, 64, 1024])
def test_adapters_of_any_rank_fit_and_a_whole_state_does_not(tmp_path: Path, rank: int) -> None:
    """A rank beyond the model's width makes adapters larger than the model: the recipe wants them."""
    model = [(f"layers.{number}.{name}.weight", (256, 128)) for number in range(8) for name in ("q_proj", "up", "norm")]
    model += [("embed.weight", (5000, 128)), ("norm.weight", (128,))]
    write(tmp_path / "base", model)
    lora = Lora(rank, 1.0, ("q_proj", "up"))
    targets = [(name, shape) for name, shape in model if name.split(".")[-2] in lora.targets]
    halves = [(f"{name}.lora_a", (rank, shape[1])) for name, shape in targets]
    halves += [(f"{name}.lora_b", (shape[0], rank)) for name, shape in targets]
    size = write(tmp_path / "adapters", halves)
    assert size <= most_bytes(tmp_path / "base", lora) <= size + SLACK_BYTES + 512 * len(halves)
    if rank <= 8:
        assert most_bytes(tmp_path / "base", lora) < (tmp_path / "base").stat().st_size / 4


def test_a_model_of_other_names_is_bounded_all_the_same(tmp_path: Path) -> None:
    write(tmp_path / "base", [("h.0.c", (64, 32)), ("b", (32,))])
    assert 2 * 4 * 96 <= most_bytes(tmp_path / "base", Lora(4, 1.0, ("q_proj",))) < 2 * 4 * 96 + SLACK_BYTES + 1024


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=40)


@given(st.dictionaries(names, st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=6))
@settings(deadline=None)
def test_no_honest_file_is_refused_whatever_its_names(tmp_path_factory, shapes: dict[str, tuple[int, ...]]) -> None:
    path = tmp_path_factory.mktemp("base") / "base"
    size = write(path, shapes.items())
    assert size <= most_bytes(path, None)
