"""Models that the file names by their paths."""

from pydantic import BaseModel


class Model(BaseModel):
    """Something to calculate with."""

    order: int
