"""Cause → what to change, in the settings of each framework."""

from __future__ import annotations

from collections.abc import Mapping

ADVICE: Mapping[str, Mapping[str, str]] = {
    "trl": {
        "slow_reward": "Declare slow reward functions `async`: TRL awaits all of them together.",
        "sync_stall": "vllm_mode=colocate moves weights inside the process; a higher steps_per_generation does so less often.",
        "long_tail": "Lower max_completion_length where long answers earn nothing; use_vllm=True fills rows that become free.",
        "no_signal": "Leave out tasks that are always or never solved; a higher num_generations makes differences likelier.",
    },
    "verl": {
        "slow_reward": "Compute rewards while others are still sampled (reward_model.enable, reward_model.num_workers).",
        "double_forward": "algorithm.rollout_correction.bypass_mode=True takes the engine's own logprobs"
        " (actor_rollout_ref.rollout.calculate_log_probs=True).",
        "sync_stall": "Raise actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes, or train an adapter.",
        "long_tail": "Sample beside the trainer (verl.experimental.one_step_off_policy, fully_async_policy), or lower"
        " data.max_response_length where long answers earn nothing.",
        "imbalance": "trainer.balance_batch=True divides sequences by their lengths.",
        "io_bound": "Raise trainer.save_freq.",
        "frequent_evaluation": "Raise trainer.test_freq, or evaluate fewer tasks.",
        "no_signal": "algorithm.filter_groups.enable=True leaves such groups out, or leave out tasks that are always solved.",
    },
    "prime_rl": {
        "sync_stall": "weight_broadcast.type=nccl (or nixl) does not go through files.",
        "io_bound": "Raise ckpt.interval.",
        "staleness_waits": "Raise orchestrator.max_off_policy_steps, and the number of rollouts in flight.",
        "long_tail": "Lower the limit of tokens where long answers earn nothing.",
        "failed_attempts": "`error/…` of the orchestrator's metrics names what failed.",
        "no_signal": "Leave out tasks that are always or never solved.",
    },
}
