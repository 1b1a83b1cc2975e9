"""Test of the live process under the limits of the unit with a real systemd, and a rank in a cgroup like that of
slurmstepd."""

from __future__ import annotations

import json
import sys

from systemd_container import CHECKOUT, SystemdContainer
from waiting import until

SETTINGS = """
interval_seconds = 1.0
[checks.failslow]
client = true
"""
# A scope with the name of slurmstepd, and below it a cgroup of the job, in the hierarchy that systemd uses here.
RUN_IN_JOB = """
path=$(sed -n 's/^0:://p; s/^1:name=systemd://p' /proc/self/cgroup | grep slurmstepd.scope | head -n 1)
for mount in /sys/fs/cgroup /sys/fs/cgroup/systemd /sys/fs/cgroup/unified; do
    [ -d "$mount$path" ] || continue
    mkdir -p "$mount$path/job_4711/step_0" && echo $$ >"$mount$path/job_4711/step_0/cgroup.procs" && exec "$@"
done
exit 9
"""
RANK_PROGRAM = """
import time
from healthd.client import step
while True:
    step(busy=0.05)
    time.sleep(0.05)
"""


def test_live_process_receives_rank_under_limits_of_unit():
    with SystemdContainer() as box:
        box.install_healthd(SETTINGS)
        box.systemctl("start", "healthd")
        file = box.path("/run/healthd/failslow.json")
        sock = box.path("/run/healthd/failslow.sock")
        until(lambda: sock.exists() and sock.stat().st_mode & 0o777 == 0o666, "the socket exists, open to every user")
        scope = ["systemd-run", "--scope", "--quiet", "--unit=slurmstepd", "--slice=system.slice"]
        argv = ["sh", "-c", RUN_IN_JOB, "sh", sys.executable, "-c", RANK_PROGRAM]
        rank = box.popen(*scope, f"--setenv=PYTHONPATH={CHECKOUT}", "--setenv=RANK=3", *argv)
        try:
            until(lambda: (file.exists() and json.loads(file.read_text())["jobs"]) or rank.poll() is not None)
            assert rank.poll() is None, "the rank has ended"
            (job,) = json.loads(file.read_text())["jobs"]
            assert (job["job"], job["ranks"], job["slow"]) == ("4711", 1, False)
        finally:
            box.systemctl("stop", "slurmstepd.scope", check=False)
            rank.communicate(timeout=240)
        assert [problem for problem in box.status()["problems"] if "fail-slow" in problem] == []
