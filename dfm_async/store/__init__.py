"""Stores that keep jobs: what was submitted, every event of their logs, and which process owns them."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.store.base import Entry as Entry
    from dfm_async.store.base import Follower as Follower
    from dfm_async.store.base import NewJob as NewJob
    from dfm_async.store.base import Owner as Owner
    from dfm_async.store.base import Request as Request
    from dfm_async.store.base import Store as Store
    from dfm_async.store.base import StoredJob as StoredJob
    from dfm_async.store.batching import Batch as Batch
    from dfm_async.store.batching import Committed as Committed
    from dfm_async.store.group_commit import Command as Command
    from dfm_async.store.group_commit import GroupCommitStore as GroupCommitStore
    from dfm_async.store.group_commit import Writer as Writer
    from dfm_async.store.postgres import PostgresStore as PostgresStore
    from dfm_async.store.urls import open_store as open_store
