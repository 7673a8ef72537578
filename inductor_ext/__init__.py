"""The backend and what a user calls directly.

``torch.compile(model, backend="portable_ops")`` needs no import.  From here come :func:`explain`, the
:func:`reports` of what was compiled, :func:`config_patches` for ahead-of-time packages, and the calls with which
third parties add patterns and kernels.
"""

from __future__ import annotations

from .backend import ExpectationError, config_patches, portable_ops
from .explain import explain
from .gate import register_features
from .lowering import register_operator
from .report import Report, Site, reports
from .rewrite import register_pattern
from .settings import SettingError, Settings

__all__ = [
    "ExpectationError",
    "Report",
    "SettingError",
    "Settings",
    "Site",
    "config_patches",
    "explain",
    "portable_ops",
    "register_features",
    "register_operator",
    "register_pattern",
    "reports",
]
