"""Built-in reasons: those that Slurm itself sets, as in SchedMD's source, and those that only begin like one."""

from __future__ import annotations

import pytest

from healthd.agent.slurm.foreign_reasons import find_meaning
from healthd.common.slurm.builtin_reasons import (
    APPENDED,
    Group,
    copied_reason_group,
    is_set_by_slurm,
    reason_group,
    replaces_drain_reason,
    strip_appended,
)

SLURM_REASONS = {
    "Not responding": Group.NOT_RESPONDING,
    "Node unexpectedly rebooted": Group.REBOOTED,
    "Kill task failed": Group.UNKILLABLE,
    "Kill task failed (JobId=4711 StepId=0)": Group.UNKILLABLE,
    "Prolog error": Group.PROLOG_EPILOG,
    "Epilog error": Group.PROLOG_EPILOG,
    "Prolog/Epilog failure": Group.PROLOG_EPILOG,
    "Job env setup error": Group.PROLOG_EPILOG,
    "Duplicate jobid": Group.DUPLICATE,
    "batch job complete failure": Group.BATCH,
    "Job step not running (JobId=4711 StepId=Batch)": Group.BATCH,
    "SlurmdSpoolDir is full": Group.SPOOL,
    "NO NETWORK ADDRESS FOUND": Group.ADDRESS,
    "Bad core count": Group.INTERNAL,
    "switch_g_job_postfini failed": Group.INTERNAL,
    "ResumeTimeout reached": Group.TIMED_OUT,
    "reboot timed out": Group.TIMED_OUT,
    "Could not unpack gres data": Group.REGISTRATION,
    "Low socket*core*thread count": Group.REGISTRATION,
    "Low CPUs": Group.REGISTRATION,
    "Low TmpDisk": Group.REGISTRATION,
    "CoreSpec differ": Group.REGISTRATION,
    "Low RealMemory (reported:1 < 100.00% of configured:2)": Group.REGISTRATION,
    "Low socket*core*thread count, Low CPUs": Group.REGISTRATION,
    "gres/gpu count reported lower than configured (7 < 8)": Group.REGISTRATION,
    "gres/gpu count reported lower than configured (0 < 1), Low RealMemory (reported:1 < 95.00% of configured:20)": (
        Group.REGISTRATION
    ),
    "gres/gpu count too low (7 < 8)": Group.REGISTRATION,
    "gres/gpu:h100 count too low (7 < 8)": Group.REGISTRATION,
    "gres/gpu count changed and jobs are using them (8 != 7)": Group.REGISTRATION,
    "gres/gpu type changed and jobs are using them": Group.REGISTRATION,
    "gres/gpu type (a100) reported but not configured": Group.REGISTRATION,
    "RestrictedCoresPerGPU=4 but no gpus on node n1": Group.REGISTRATION,
    "Reported active features (a,b) are not a superset of currently active changeable features (c)": Group.REGISTRATION,
}
REQUESTED_REASONS = {
    "Reboot ASAP": Group.REBOOT,
    "reboot requested": Group.REBOOT,
    "reboot issued": Group.REBOOT,
    "reboot complete": Group.REBOOT,
    "POWER_DOWN_ASAP": Group.POWER,
}
SITE_REASONS = [
    *("Prolog error: 571 xid 13 errors", "Epilog error on /scratch", "Not responding to ping", "Low CPUs, ticket 12"),
    *("gres/gpu 3 replaced", "Kill task failed again", "Duplicate jobid 12", "batch job complete failure?", "Low"),
    *("gres/gpu count reported lower than configured (7 < 8) since Monday", "reboot ASAP please", "my Prolog error"),
    *("Node unexpectedly rebooted twice", "ResumeTimeout too short", "prolog error", "", "Prolog error\nfan"),
    *("Low RealMemory (DIMM A3)", "SlurmdSpoolDir is full of cores"),
]


@pytest.mark.parametrize(("reason", "group"), [*SLURM_REASONS.items(), *REQUESTED_REASONS.items()])
def test_reason_group_matches_each_reason_of_slurm(reason: str, group: Group) -> None:
    assert reason_group(reason) is group
    assert find_meaning(reason) is not None
    for appended in APPENDED:
        assert reason_group(reason + appended) is group


@pytest.mark.parametrize("reason", [reason for reason in (*SLURM_REASONS, *REQUESTED_REASONS) if len(reason) > 20])
def test_copied_reason_group_recognises_reason_truncated_by_sinfo(reason: str) -> None:
    assert copied_reason_group(reason[:20]) is {**SLURM_REASONS, **REQUESTED_REASONS}[reason]


@pytest.mark.parametrize("reason", SITE_REASONS)
def test_reason_group_returns_none_for_site_reason(reason: str) -> None:
    assert reason_group(reason) is None
    assert not is_set_by_slurm(reason)
    assert not replaces_drain_reason(reason)


def test_is_set_by_slurm_is_false_for_requested_reasons() -> None:
    assert [reason for reason in SLURM_REASONS if not is_set_by_slurm(reason)] == []
    assert [reason for reason in REQUESTED_REASONS if is_set_by_slurm(reason)] == []


def test_every_group_has_an_explanation() -> None:
    explained = {find_meaning(reason) for reason in (*SLURM_REASONS, *REQUESTED_REASONS)}
    assert len(explained) == len(Group)


def test_only_unkillable_and_registration_replace_drain_reason() -> None:
    groups = {group for reason, group in SLURM_REASONS.items() if replaces_drain_reason(reason)}
    assert groups == {Group.UNKILLABLE, Group.REGISTRATION}
    assert not replaces_drain_reason("Prolog error")


def test_strip_appended_removes_all_text_added_by_slurm() -> None:
    assert strip_appended("fan : reboot issued : Not responding") == "fan"
