"""Where jobs run: the interface of a target, and what ``Session(target="local")`` runs on."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.engine.target import Target as Target
    from dfm_async.results.record import JobRecord as JobRecord
    from dfm_async.targets.local import FederationRunner as FederationRunner
    from dfm_async.targets.local import JobExecution as JobExecution
