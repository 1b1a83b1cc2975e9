"""The daemon's default directories, and the names of files in them that other programs open."""

from __future__ import annotations

RUNTIME_DIR, STATE_DIR = "/run/healthd", "/var/lib/healthd"
# In the runtime directory.
SOCKET = "healthd.sock"
VERDICT_FILE = "verdict"
