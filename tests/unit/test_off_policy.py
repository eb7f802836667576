from __future__ import annotations

import pytest

from redline.config.schema import TrainerConfig
from redline.trainer.off_policy import correction_for


@pytest.mark.parametrize("lags", [(), (0,), (0, 0, 0)])
def test_a_batch_of_the_current_policy_changes_nothing(lags: tuple[int, ...]) -> None:
    config = TrainerConfig()
    assert correction_for(lags, config) is config


@pytest.mark.parametrize(("loss", "correction"), [("clip", "token_truncate"), ("gspo", "sequence_truncate")])
def test_one_older_group_is_enough_for_truncated_importance_sampling(loss: str, correction: str) -> None:
    config = TrainerConfig(loss=loss, mismatch_high=3.0)
    corrected = correction_for((0, 2, 0), config)
    assert corrected == config.model_copy(update={"mismatch": correction})
    assert config.mismatch == "none"


def test_a_correction_that_the_recipe_chose_stands() -> None:
    config = TrainerConfig(mismatch="token_mask")
    assert correction_for((3,), config) is config


def test_a_recipe_may_want_none_at_all_also_after_its_config_was_written_and_read_again() -> None:
    config = TrainerConfig(correct_lag=False)
    assert correction_for((3,), TrainerConfig(**config.model_dump())).mismatch == "none"
    assert correction_for((3,), TrainerConfig(**TrainerConfig().model_dump())).mismatch == "token_truncate"
