"""Sessions, jobs and the iterators that their methods return."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.model.events import Results as Results
    from dfm_async.model.info import JobInfo as JobInfo
    from dfm_async.model.info import ScheduleInfo as ScheduleInfo
    from dfm_async.results.watching import ActivityReader as ActivityReader
    from dfm_async.session.broadcast import EachStream as EachStream
    from dfm_async.session.broadcast import SiteReply as SiteReply
    from dfm_async.session.job import Job as Job
    from dfm_async.session.mapping import MapItem as MapItem
    from dfm_async.session.mapping import MapStream as MapStream
    from dfm_async.session.profiling import Profiling as Profiling
    from dfm_async.session.schedule import Schedule as Schedule
    from dfm_async.session.schedule import ScheduleOptions as ScheduleOptions
    from dfm_async.session.session import Session as Session
    from dfm_async.session.stream import EventStream as EventStream
    from dfm_async.session.stream import ResultStream as ResultStream
    from dfm_async.session.watch import InfoWatch as InfoWatch
    from dfm_async.session.watch import JobWatch as JobWatch
    from dfm_async.session.watch import SiteWatch as SiteWatch
