"""Applications that were written for NVIDIA's Data Federation Mesh, run unmodified and without generated code.

``python -m dfm_async.compat federation.dfm.yaml app.py`` runs one. Nothing of this is active unless it is asked for.
"""

from dfm_async.base.lazy import lazy_imports

with lazy_imports(__name__):
    from dfm_async.compat.modules import install as install
