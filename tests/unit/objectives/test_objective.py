import pytest
import torch

from p2prl.errors import ConfigError
from p2prl.objectives import OBJECTIVES, Batch, objective
from tests.batches import draw


def test_an_unknown_option_gets_the_nearest() -> None:
    batch, logp = draw(1)
    with pytest.raises(ConfigError, match="no option 'clp'; did you mean 'clip'"):
        OBJECTIVES["gepo"](batch, logp, clp=0.2)
    with pytest.raises(ConfigError, match="reinforce has no option 'clip'.*none"):
        OBJECTIVES["reinforce"](batch, logp, clip=0.2)


def test_a_needed_option_is_asked_for() -> None:
    batch, logp = draw(1)
    with pytest.raises(ConfigError, match="dr_grpo needs the option 'max_length'"):
        OBJECTIVES["dr_grpo"](batch, logp)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gepo", {"clip": -0.2}),
        ("gepo", {"clip": float("nan")}),
        ("vcpo", {"cap": 0.0}),
        ("a3po", {"cap_mode": "drop"}),
        ("a3po", {"dual_clip": 1.0}),
        ("gepo_vcpo", {"baseline": "min-variance"}),
        ("gepo_vcpo", {"baseline_over": "some"}),
        ("dppo", {"divergence": "js"}),
        ("dr_grpo", {"max_length": 0}),
        ("m2po", {"second_moment": float("inf")}),
    ],
)
def test_a_value_that_means_nothing_is_refused(name: str, options: dict) -> None:
    batch, logp = draw(1)
    with pytest.raises(ConfigError, match=next(iter(options))):
        OBJECTIVES[name](batch, logp, **options)


def test_log_probs_of_another_shape_are_refused() -> None:
    batch, logp = draw(1)
    with pytest.raises(ValueError, match="must agree"):
        OBJECTIVES["gepo"](batch, logp[:, :3])


def test_the_function_sees_a_prepared_batch_and_no_padding() -> None:
    @objective(per="token")
    def mine(batch: Batch, logp: torch.Tensor, *, power: float = 2.0):
        assert batch.advantage is not None and not logp[~batch.mask].any()
        return (logp**power).sum(), {"token_seen": 1.0}

    batch, logp = draw(2)
    loss, metrics = mine(batch, torch.where(batch.mask, logp, torch.nan), power=3.0)
    assert loss.isfinite() and metrics == {"token_seen": 1.0}
    assert (mine.name, mine.per, mine.options) == ("mine", "token", {"power": 2.0})
    assert mine.__doc__ is None and mine.__name__ == "mine"


def test_every_objective_says_what_it_is() -> None:
    for name, item in OBJECTIVES.items():
        assert item.name == name
        assert item.__doc__ is not None and len(item.__doc__) > 60
        assert item.per in ("answer", "token")
