"""Plans of pipelines: where each node runs, why, and what it costs. Pure."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.model.ids import Location as Location
    from dfm_async.planning.estimate import Alternative as Alternative
    from dfm_async.planning.estimate import NodeCost as NodeCost
    from dfm_async.planning.estimate import PlanCost as PlanCost
    from dfm_async.planning.estimate import Transfer as Transfer
    from dfm_async.planning.plan import Explanation as Explanation
    from dfm_async.planning.plan import Plan as Plan
    from dfm_async.planning.profile import CallSamples as CallSamples
    from dfm_async.planning.profile import LinkSamples as LinkSamples
    from dfm_async.planning.profile import Profile as Profile
