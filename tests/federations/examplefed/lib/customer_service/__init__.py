"""Greetings."""

from ._greet_me import GreetMe
from ._reception import GreetMeReception

__all__ = ["GreetMe", "GreetMeReception"]
