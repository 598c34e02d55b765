"""A federation as a web service. Needs the extra ``web``."""

from dfm_async.base.lazy import lazy_imports as _lazy_imports
from dfm_async.base.text import install_hint as _install_hint

try:
    import starlette as _starlette  # noqa: F401 - only to name the extra that is missing
except ImportError as error:
    raise ImportError(f"web services need an extra: {_install_hint('web')}") from error

with _lazy_imports(__name__):
    from dfm_async.web.access import Action as Action
    from dfm_async.web.access import AllowAnyone as AllowAnyone
    from dfm_async.web.access import Authorizer as Authorizer
    from dfm_async.web.access import Principal as Principal
    from dfm_async.web.access import TokenAuthorizer as TokenAuthorizer
    from dfm_async.web.limits import WebLimits as WebLimits
    from dfm_async.web.service import Service as Service
