"""A federation as a web service. Needs the extra ``web``: ``pip install 'dfm-async[web]'``."""

from dfm_async.web.access import Action, Authorizer, Principal
from dfm_async.web.limits import WebLimits
from dfm_async.web.service import Service

__all__ = ["Action", "Authorizer", "Principal", "Service", "WebLimits"]
