"""What ``Session.stats()`` returns."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.model.stats import LaneStats as LaneStats
    from dfm_async.model.stats import LimitStats as LimitStats
    from dfm_async.model.stats import SessionStats as SessionStats
    from dfm_async.model.stats import SiteStats as SiteStats
    from dfm_async.model.stats import TargetStats as TargetStats
    from dfm_async.model.stats import Traffic as Traffic
    from dfm_async.model.stats import WorkerStats as WorkerStats
