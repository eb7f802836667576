"""What other programs of this kind call keys of ours: whoever comes from one writes its names. Loads nothing."""

from __future__ import annotations

from collections.abc import Mapping

ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("lr", "actor_learning_rate"), "trainer.learning_rate"),
    **dict.fromkeys(("beta", "kl_loss_coef", "kl_beta"), "trainer.kl_coef"),
    **dict.fromkeys(("epsilon", "clip_ratio", "clip_eps"), "trainer.clip_low"),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high"), "trainer.clip_high"),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), "trainer.epochs"),
    **dict.fromkeys(("num_mini_batches", "steps_per_generation"), "trainer.mini_batches"),
    **dict.fromkeys(("clip_grad", "grad_clip", "gradient_clipping"), "trainer.max_grad_norm"),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), "trainer.lora.rank"),
    "lora_alpha": "trainer.lora.alpha",
    **dict.fromkeys(("target_modules", "lora_target_modules"), "trainer.lora.targets"),
    **dict.fromkeys(("num_generations", "rollouts_per_example", "samples_per_prompt"), "rollouts.group_size"),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "prompts_per_step", "per_device_train_batch_size"), "rollouts.groups_per_step"
    ),
    **dict.fromkeys(("max_completion_length", "max_response_length", "max_output_tokens"), "rollouts.max_new_tokens"),
    "max_prompt_length": "rollouts.max_prompt_tokens",
    **dict.fromkeys(("max_steps", "num_steps", "total_steps"), "run.steps"),
    **dict.fromkeys(("output_dir", "save_dir"), "run.folder"),
    **dict.fromkeys(("save_steps", "save_freq"), "run.checkpoint_every"),
    **dict.fromkeys(("eval_steps", "eval_every", "test_freq"), "rollouts.evaluation.every"),
    **dict.fromkeys(("model_name", "model_name_or_path", "name_or_path"), "model.path"),
    **dict.fromkeys(("max_async_level", "max_staleness"), "buffer.max_lag"),
}
"""The last part of a key elsewhere → the key here that comes nearest to it."""
