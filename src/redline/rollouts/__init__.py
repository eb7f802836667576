"""Stage 1: tasks, attempts, rewards, advantages."""

from redline.rollouts.background import BackgroundRollouts
from redline.rollouts.chat import Chat
from redline.rollouts.runner import SingleTurnRollouts
from redline.rollouts.tasks.sources import make_task_source

__all__ = ["BackgroundRollouts", "Chat", "SingleTurnRollouts", "make_task_source"]
