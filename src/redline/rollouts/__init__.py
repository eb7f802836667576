"""Stage 1: tasks, attempts, rewards, advantages."""

from redline.rollouts.chat import Chat
from redline.rollouts.conversation import Conversation
from redline.rollouts.dispatcher import Dispatcher
from redline.rollouts.setup import RolloutSetup
from redline.rollouts.tasks.sources import make_task_source

__all__ = ["Chat", "Conversation", "Dispatcher", "RolloutSetup", "make_task_source"]
