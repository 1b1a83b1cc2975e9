"""The base class of the errors that healthd raises: each message is one sentence for the user.

Errors of Python (OSError) are passed on unchanged.
"""

from __future__ import annotations


class HealthdError(Exception):
    """The root of these errors."""
