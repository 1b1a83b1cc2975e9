"""Default folders of the daemon and the files that other programs open in them."""

from __future__ import annotations

RUNTIME_DIR, STATE_DIR = "/run/healthd", "/var/lib/healthd"
# In the runtime directory.
SOCKET = "healthd.sock"
VERDICT_FILE = "verdict"
