"""Every exception that the library raises, by theme.

All of them derive from :class:`DfmError`. Their data is in attributes, their message is built from that data, and
all can be pickled.
"""

from __future__ import annotations

from dfm_async.errors import exchange, federations, jobs, pipelines
from dfm_async.errors.exchange import *
from dfm_async.errors.federations import *
from dfm_async.errors.jobs import *
from dfm_async.errors.pipelines import *
from dfm_async.errors.root import DfmError

__all__ = ["DfmError"]
__all__ += exchange.__all__
__all__ += federations.__all__
__all__ += jobs.__all__
__all__ += pipelines.__all__
