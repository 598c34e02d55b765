"""Discovery: what values the parameters of operations can have, as the sites advise.

Adapters have advisors for that: methods that :func:`field_advisor` marks and that return advised values.
``await session.discover(pipeline)`` queries them, and returns a :class:`Discovery`: a tree of advice per site and node.
"""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.discovery.advice import AdviceError as AdviceError
    from dfm_async.discovery.advice import BranchFieldAdvice as BranchFieldAdvice
    from dfm_async.discovery.advice import Discovery as Discovery
    from dfm_async.discovery.advice import ErrorFieldAdvice as ErrorFieldAdvice
    from dfm_async.discovery.advice import FieldAdvice as FieldAdvice
    from dfm_async.discovery.advice import PartialFieldAdvice as PartialFieldAdvice
    from dfm_async.discovery.advice import SingleFieldAdvice as SingleFieldAdvice
    from dfm_async.discovery.advised_values import AdvisedDateRange as AdvisedDateRange
    from dfm_async.discovery.advised_values import AdvisedDict as AdvisedDict
    from dfm_async.discovery.advised_values import AdvisedError as AdvisedError
    from dfm_async.discovery.advised_values import AdvisedLiteral as AdvisedLiteral
    from dfm_async.discovery.advised_values import AdvisedOneOf as AdvisedOneOf
    from dfm_async.discovery.advised_values import AdvisedSubsetOf as AdvisedSubsetOf
    from dfm_async.discovery.advised_values import AdvisedValue as AdvisedValue
    from dfm_async.discovery.advised_values import Okay as Okay
    from dfm_async.discovery.advisors import AdviceContext as AdviceContext
    from dfm_async.discovery.advisors import field_advisor as field_advisor
    from dfm_async.discovery.growth import build_advice as build_advice
