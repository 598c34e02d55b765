"""Each site is a pool of worker processes on this machine."""

from dfm_async.targets.local.target import LocalTarget

__all__ = ["LocalTarget"]
