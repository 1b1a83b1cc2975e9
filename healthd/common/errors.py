"""Base class of healthd's errors: each message is one sentence for the user.

Python's own errors (OSError) are passed on unchanged.
"""

from __future__ import annotations


class HealthdError(Exception):
    """Root of healthd's errors."""
