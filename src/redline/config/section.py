"""The base of every section of a recipe. Loads no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

LocalPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
"""`~` is the user's folder: no shell sees a recipe."""


class Section(BaseModel):
    """Frozen, strict about unknown keys, documented by the string under each field."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_means_defaults(cls, values: Any) -> Any:
        """YAML reads a section whose keys are all commented out as null."""
        return {} if values is None else values
