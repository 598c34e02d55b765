"""What the sites run."""

from .create import Create
from .plot2d import Plot2D
from .subset import Subset

__all__ = ["Create", "Plot2D", "Subset"]
