"""All sites on the caller's loop, without processes: for tests, notebooks and debugging."""

from dfm_async.targets.inline.target import InlineTarget

__all__ = ["InlineTarget"]
