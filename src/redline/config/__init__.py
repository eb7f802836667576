"""Recipes: schema, loading, and the values we fill in. Torch-free, so that a wrong key is refused at once."""

from redline.config.effects import refuse_engine_keys_without_effect, refuse_without_effect
from redline.config.engine_recipe import EngineRecipe
from redline.config.load import load_recipe, make_config, read_recorded, recipe_values, validate, validate_engine
from redline.config.resolve import Resolved, ResolvedEngine, resolve, resolve_engine
from redline.config.schema import Config

__all__ = [
    "Config",
    "EngineRecipe",
    "Resolved",
    "ResolvedEngine",
    "load_recipe",
    "make_config",
    "read_recorded",
    "recipe_values",
    "refuse_engine_keys_without_effect",
    "refuse_without_effect",
    "resolve",
    "resolve_engine",
    "validate",
    "validate_engine",
]
