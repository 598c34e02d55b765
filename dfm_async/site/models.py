"""The base of models that nv_dfm_core has, for where it is not installed. Needs pydantic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, model_serializer

__all__ = ["PolymorphicBaseModel"]


class PolymorphicBaseModel(BaseModel):
    """A model that is written with all its fields, also where a model that it derives from is declared.

    Unlike DFM's own it never imports a class because data names it: ``dfm_class_name`` is a field like others.
    """

    @model_serializer(mode="wrap")
    def serialize_model(self, _handler: Callable[[Any], Any]) -> dict[str, Any]:
        """Writes all fields."""
        return {name: getattr(self, name) for name in type(self).model_fields}
