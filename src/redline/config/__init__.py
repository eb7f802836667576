"""Recipes: schema, loading, and the values we fill in. Torch-free, so that a wrong key is refused at once."""

from redline.config.effects import refuse_without_effect
from redline.config.load import load_recipe, make_config, validate
from redline.config.resolve import Resolved, resolve
from redline.config.schema import Config

__all__ = ["Config", "Resolved", "load_recipe", "make_config", "refuse_without_effect", "resolve", "validate"]
