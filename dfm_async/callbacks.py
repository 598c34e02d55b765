"""Where callbacks of jobs run: on the loop of the session, on another loop, or when the application calls them."""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.session.callbacks import CallbackDispatcher as CallbackDispatcher
    from dfm_async.session.callbacks import LoopDispatcher as LoopDispatcher
    from dfm_async.session.callbacks import ManualDispatcher as ManualDispatcher
    from dfm_async.session.callbacks import OtherLoopDispatcher as OtherLoopDispatcher
