"""The base of every section of settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from jaxtrain.config.values import read_value


class Section(BaseModel):
    """A frozen group of settings; unknown keys and numbers that are not finite are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _read_by_type(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        fields = cls.model_fields
        return {
            key: read_value(value, fields[key].annotation) if key in fields else value for key, value in values.items()
        }
