"""The daemon of the package reads the machine's own kernel log, under a real systemd."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from packages import RELEASES, built_package, package_node
from requirements import require, require_root
from test_package import XID, apt, wait_for_status, xid_condition

# Lines that root writes count like those of the kernel.
ACCEPT_INJECTED = 'baseline_file = ""\n[kernel_log]\naccept_injected = true\n[metrics]\nlisten = "off"\n'


@pytest.mark.parametrize("release", RELEASES)
def test_xid_in_kernel_log_opens_condition(release: str, tmp_path: Path) -> None:
    require_root()
    if not os.path.exists("/dev/kmsg"):
        require("there is no /dev/kmsg")
    (tmp_path / "new.deb").write_bytes(built_package(release).read_bytes())
    with package_node(release, tmp_path, kmsg=True) as box:
        box.write("/etc/healthd/healthd.toml", ACCEPT_INJECTED)
        apt(box, "install", f"{tmp_path}/new.deb")
        with open("/dev/kmsg", "w", buffering=1) as log:
            log.write(f"<12>{XID}\n")
        wait_for_status(box, lambda found: xid_condition(found) is not None, "the Xid opens a condition")
        assert "gpu_xid/79 fffe:1f:1f.0" in box.exec("healthd", "status", check=False).stdout
