"""What the checks can see on this node: from one round of them (healthd.agent.scheduler.one_round). Pure.

A fault that a check finds is no matter of the doctor's; that a check cannot look is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from healthd.agent.doctor.result import Line, absent, fails, limited, works
from healthd.common.model import CheckResult, Outcome
from healthd.common.text import without_class
from healthd.common.values import Value

OWN_LINES = ("gpu_access", "ipmi_sel", "mount", "clock")  # beside these, the others are one line
NAMED = 3  # of the checks that cannot look, so many with their reason


class Around(Value, frozen=True):
    """What no check says: whether there is a BMC's device, and ipmitool; whether root looks."""

    ipmi_device: bool
    ipmitool: bool
    is_root: bool


def lines(results: Sequence[CheckResult], around: Around) -> Iterator[Line]:
    results = [replace(result, error=without_class(result.error)) for result in results]
    of = {name: [result for result in results if result.check == name] for name in OWN_LINES}
    yield from (_gpus(result) for result in of["gpu_access"])
    yield _ipmi(of["ipmi_sel"], around)
    yield _mounts(of["mount"])
    yield from (_clock(result) for result in of["clock"])
    yield _others([result for result in results if result.check not in OWN_LINES], results, around)


def _gpus(result: CheckResult) -> Line:
    if result.outcome is not Outcome.COMPLETED:
        how = {Outcome.TIMED_OUT: "NVML hangs"}.get(result.outcome, "NVML cannot be asked")
        return fails("GPUs", f"{how}: {result.error}", "nvidia-smi", "dmesg | grep -i nvrm")
    seen = {observation.name: observation for observation in result.observations}
    if "gpus" not in seen:
        if not result.findings:
            return absent("GPUs", "PCI shows no NVIDIA GPU")
        finding = result.findings[0]
        return fails("GPUs", finding.message, f"healthd explain {finding.code}")
    driver = dict(seen["gpu_driver_info"].labels)["version"] if "gpu_driver_info" in seen else ""
    count = int(seen["gpus"].value)
    message = f"NVML answers: driver {driver or 'of no known version'}, {count} GPU{'' if count == 1 else 's'}"
    if result.findings:
        finding = result.findings[0]
        return limited("GPUs", f"{message}; {finding.message}", f"healthd explain {finding.code}")
    return works("GPUs", message)


def _ipmi(results: Sequence[CheckResult], around: Around) -> Line:
    if not around.ipmi_device:
        message = (
            "no /dev/ipmi0: the BMC's event log is not read (modprobe -a ipmi_devintf ipmi_si, if this machine has one)"
        )
        return absent("IPMI", message)
    if not results:
        return absent("IPMI", "check ipmi_sel is switched off")
    if not around.ipmitool:
        return limited("IPMI", "there is a BMC but no ipmitool: its event log is not read", "install ipmitool")
    (result,) = results
    if result.outcome is not Outcome.COMPLETED:
        return limited("IPMI", f"the BMC's event log cannot be read: {result.error}", "ipmitool sel info")
    return works("IPMI", "ipmitool reads the BMC's event log")


def _mounts(results: Sequence[CheckResult]) -> Line:
    if not results:
        message = "no file system is watched: say which ones jobs need"
        return limited("mounts", message, "healthd baseline --write", '[checks.mount."/data"] in healthd.toml')
    silent = [result for result in results if result.outcome is not Outcome.COMPLETED]
    broken = [result for result in results if result.findings and result not in silent]
    count = f"{len(results)} watched"
    if silent:
        message = "; ".join(f"{result.instance}: {result.error}" for result in silent[:NAMED])
        return limited("mounts", f"{count}, {len(silent)} not answering: {message}", "healthd check mount")
    if broken:
        message = "; ".join(result.findings[0].message for result in broken[:NAMED])
        return limited("mounts", f"{count}; {message}", "healthd check mount")
    return works("mounts", f"{count}: {', '.join(result.instance for result in results)}")


def _clock(result: CheckResult) -> Line:
    if result.outcome is not Outcome.COMPLETED:
        return limited("clock", f"it cannot be asked how right it is: {result.error}", "timedatectl")
    if result.findings:
        finding = result.findings[0]
        return limited(
            "clock", f"{finding.message}; munge refuses what is minutes off", f"healthd explain {finding.code}"
        )
    return works("clock", "nothing is wrong with it")


def _others(results: Sequence[CheckResult], every: Sequence[CheckResult], around: Around) -> Line:
    """Return the line of the checks without a line of their own. `every`: all results, counted as in status."""
    blind = [result for result in results if result.outcome is not Outcome.COMPLETED]
    if not blind:
        nothing = sum(result.nothing is not None for result in every)
        have = "has" if nothing == 1 else "have"
        without = f", {nothing} {have} nothing to check (healthd check lists them)" if nothing else ""
        return works("checks", f"{len(every) - nothing} of {len(every)} can check this node{without}")
    if len({result.error for result in blind}) == 1:
        said, more = blind[0].error, ""
    else:
        said = "; ".join(f"{result.run}: {result.error}" for result in blind[:NAMED])
        more = f"; and {len(blind) - NAMED} more" if len(blind) > NAMED else ""
    fix = ("healthd check",) if around.is_root else ("sudo healthd doctor",)
    return limited("checks", f"{len(blind)} of {len(results)} others cannot look: {said}{more}", *fix)
