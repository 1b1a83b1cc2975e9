"""Base class for healthd's errors. Each message is one sentence for the user.

Python's own errors (OSError) are passed on unchanged.
"""

from __future__ import annotations


class HealthdError(Exception):
    """Base class for healthd's errors."""
