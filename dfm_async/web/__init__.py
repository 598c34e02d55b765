"""A federation as a web service. Needs the extra ``web``."""

from dfm_async.base.installation import install_hint

try:
    import starlette as _starlette  # noqa: F401 - only to tell in plain words what is missing
except ImportError as error:
    raise ImportError(f"web services need an extra: {install_hint('web')}") from error

from dfm_async.web.access import Action, AllowAnyone, Authorizer, Principal, TokenAuthorizer
from dfm_async.web.limits import WebLimits
from dfm_async.web.service import Service

__all__ = ["Action", "AllowAnyone", "Authorizer", "Principal", "Service", "TokenAuthorizer", "WebLimits"]


def __dir__() -> list[str]:
    return __all__
