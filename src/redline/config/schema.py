"""What a recipe may say: a section for each stage, with the name of its package, its metrics' prefix and its trace lane.

Every field has its meaning, unit and bounds beside it: the same words are the reference and the error messages. `auto` (or
null) fields are filled once, by `resolve()`, into a new object; nothing changes a config afterwards.
"""

from __future__ import annotations

from pydantic import model_validator

from redline.config.section import Section
from redline.config.sections.buffer import BufferConfig
from redline.config.sections.engine import RunEngineConfig
from redline.config.sections.model import ModelConfig
from redline.config.sections.placement import PlacementConfig
from redline.config.sections.rollouts import RolloutsConfig
from redline.config.sections.run import RunConfig
from redline.config.sections.telemetry import TelemetryConfig
from redline.config.sections.trainer import TrainerConfig


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    """Name, length, device and folder of the run."""
    model: ModelConfig
    """The policy."""
    rollouts: RolloutsConfig
    """Tasks, attempts, rewards, evaluation."""
    buffer: BufferConfig = BufferConfig()
    """Attempts on their way to the trainer."""
    trainer: TrainerConfig = TrainerConfig()
    """Loss and optimizer."""
    engine: RunEngineConfig = RunEngineConfig()
    """The sampler."""
    placement: PlacementConfig = PlacementConfig()
    """Which process runs where."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What the run records about itself."""

    @model_validator(mode="after")
    def _group_fits_the_engine(self) -> Config:
        if self.rollouts.group_size > self.engine.max_num_seqs and not self.leaves_rows_open:
            raise ValueError(
                f"rollouts.group_size = {self.rollouts.group_size} is more than engine.max_num_seqs ="
                f" {self.engine.max_num_seqs}; raise engine.max_num_seqs"
            )
        return self

    @model_validator(mode="after")
    def _rate_lasts_as_long_as_the_run(self) -> Config:
        schedule = self.trainer.schedule
        last = schedule.warmup_steps + (schedule.decay_steps or self.run.steps)
        if schedule.kind != "constant" and not schedule.min_ratio and self.run.steps > last:
            raise ValueError(
                f"trainer.schedule.decay_steps = {schedule.decay_steps}: the learning rate is zero from step {last} on, but"
                f" run.steps = {self.run.steps}; raise trainer.schedule.decay_steps, or leave it out to fall until the run ends"
                f" (a run that has begun keeps it, and goes on until run.steps={last})"
            )
        return self

    @model_validator(mode="after")
    def _profiled_steps_are_taken(self) -> Config:
        profile = self.telemetry.profile
        late = [step for step in profile.steps if step > self.run.steps]
        if profile.what and late:
            raise ValueError(
                f"telemetry.profile.steps = {list(profile.steps)}: the run ends after step {self.run.steps}; name earlier steps"
            )
        return self

    @property
    def sequences_per_step(self) -> int:
        """groups_per_step x group_size."""
        return self.rollouts.groups_per_step * self.rollouts.group_size

    @property
    def leaves_rows_open(self) -> bool:
        """The number of rows is to follow from the attempts: nobody gave it, and the engine is redline's own."""
        return self.engine.kind == "native" and "max_num_seqs" not in self.engine.model_fields_set

    @property
    def needs_reference(self) -> bool:
        """kl_coef > 0."""
        return self.trainer.kl_coef > 0

    @property
    def needs_anchor(self) -> bool:
        """A resolved recipe's steps begin with a pass for the old policy's logprobs: recompute_old_logprobs, and more than one
        update."""
        return self.trainer.recompute_old_logprobs is True and self.trainer.updates_per_step > 1

    @property
    def needs_critic(self) -> bool:
        """Advantages come from a critic."""
        return self.rollouts.advantages == "gae"

    @property
    def trains_on_every_attempt(self) -> bool:
        """An attempt with advantage 0 has a gradient all the same: from the KL, the entropy or the critic, or because its
        advantage is only known once the batch is whole."""
        in_batch = self.rollouts.advantages in ("batch", "batch_baseline", "gae")
        return in_batch or self.trainer.kl_coef > 0 or self.trainer.entropy_coef > 0
