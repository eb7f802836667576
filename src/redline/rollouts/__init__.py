"""Stage 1: tasks, attempts, rewards, advantages."""

from redline.rollouts.chat import Chat
from redline.rollouts.reward_model import RewardModel
from redline.rollouts.runner import SingleTurnRollouts
from redline.rollouts.tasks import make_task_source

__all__ = ["Chat", "RewardModel", "SingleTurnRollouts", "make_task_source"]
