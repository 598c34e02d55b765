"""Sessions for programs without asyncio: the same methods, which block, and iterators.

Each session runs its event loop in a thread of its own.
"""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.sync.iterators import Stream as Stream
    from dfm_async.sync.job import Job as Job
    from dfm_async.sync.job import MapStream as MapStream
    from dfm_async.sync.job import Schedule as Schedule
    from dfm_async.sync.session import Session as Session
