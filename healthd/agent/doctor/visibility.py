"""Report on the checks that cannot run on this node, from one round (healthd.agent.scheduler.one_round).

The doctor does not report the faults that checks find. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from healthd.agent.doctor.result import Line, absent_line, failed_line, limited_line, ok_line
from healthd.common.model import CheckResult, Outcome
from healthd.common.text import strip_error_class
from healthd.common.values import Value

OWN_LINES = ("gpu_access", "ipmi_sel", "mount", "clock")  # checks with lines of their own; the others share one line
MAX_NAMED = 3  # maximum number of checks that cannot run and are printed with their reasons


class Environment(Value, frozen=True):
    """Facts that checks do not report: whether a BMC device and ipmitool exist, and whether the doctor runs as root."""

    ipmi_device: bool
    ipmitool: bool
    is_root: bool


def lines(results: Sequence[CheckResult], environment: Environment) -> Iterator[Line]:
    results = [replace(result, error=strip_error_class(result.error)) for result in results]
    by_check = {name: [result for result in results if result.check == name] for name in OWN_LINES}
    yield from (_gpus(result) for result in by_check["gpu_access"])
    yield _ipmi(by_check["ipmi_sel"], environment)
    yield _mounts(by_check["mount"])
    yield from (_clock(result) for result in by_check["clock"])
    yield _other_checks([result for result in results if result.check not in OWN_LINES], results, environment)


def _gpus(result: CheckResult) -> Line:
    if result.outcome is not Outcome.COMPLETED:
        problem = {Outcome.TIMED_OUT: "NVML hangs"}.get(result.outcome, "NVML fails")
        return failed_line("GPUs", f"{problem}: {result.error}", "nvidia-smi", "dmesg | grep -i nvrm")
    observations = {observation.name: observation for observation in result.observations}
    if "gpus" not in observations:
        if not result.findings:
            return absent_line("GPUs", "PCI shows no NVIDIA GPU")
        finding = result.findings[0]
        return failed_line("GPUs", finding.message, f"healthd explain {finding.code}")
    driver = dict(observations["gpu_driver_info"].labels)["version"] if "gpu_driver_info" in observations else ""
    count = int(observations["gpus"].value)
    message = f"NVML answers: driver {driver or 'version unknown'}, {count} GPU{'' if count == 1 else 's'}"
    if result.findings:
        finding = result.findings[0]
        return limited_line("GPUs", f"{message}; {finding.message}", f"healthd explain {finding.code}")
    return ok_line("GPUs", message)


def _ipmi(results: Sequence[CheckResult], environment: Environment) -> Line:
    if not environment.ipmi_device:
        message = "no /dev/ipmi0: the BMC's event log is not read (if there is a BMC: modprobe -a ipmi_devintf ipmi_si)"
        return absent_line("IPMI", message)
    if not results:
        return absent_line("IPMI", "check ipmi_sel is disabled")
    if not environment.ipmitool:
        return limited_line("IPMI", "there is a BMC but no ipmitool: its event log is not read", "install ipmitool")
    (result,) = results
    if result.outcome is not Outcome.COMPLETED:
        return limited_line("IPMI", f"the BMC's event log cannot be read: {result.error}", "ipmitool sel info")
    return ok_line("IPMI", "ipmitool reads the BMC's event log")


def _mounts(results: Sequence[CheckResult]) -> Line:
    if not results:
        message = "no file system is monitored: configure those that jobs need"
        return limited_line("mounts", message, "healthd baseline --write", '[checks.mount."/data"] in healthd.toml')
    silent = [result for result in results if result.outcome is not Outcome.COMPLETED]
    broken = [result for result in results if result.findings and result not in silent]
    count = f"{len(results)} monitored"
    if silent:
        message = "; ".join(f"{result.instance}: {result.error}" for result in silent[:MAX_NAMED])
        return limited_line("mounts", f"{count}, {len(silent)} did not answer: {message}", "healthd check mount")
    if broken:
        message = "; ".join(result.findings[0].message for result in broken[:MAX_NAMED])
        return limited_line("mounts", f"{count}; {message}", "healthd check mount")
    return ok_line("mounts", f"{count}: {', '.join(result.instance for result in results)}")


def _clock(result: CheckResult) -> Line:
    if result.outcome is not Outcome.COMPLETED:
        return limited_line("clock", f"the clock's accuracy is unknown: {result.error}", "timedatectl")
    if result.findings:
        finding = result.findings[0]
        return limited_line(
            "clock",
            f"{finding.message}; munge rejects credentials if clocks differ by minutes",
            f"healthd explain {finding.code}",
        )
    return ok_line("clock", "accurate")


def _other_checks(results: Sequence[CheckResult], all_results: Sequence[CheckResult], environment: Environment) -> Line:
    """Return one line for all checks that have no line of their own. `all_results` are counted as in status."""
    failed = [result for result in results if result.outcome is not Outcome.COMPLETED]
    if not failed:
        nothing = sum(result.nothing_to_check is not None for result in all_results)
        have = "has" if nothing == 1 else "have"
        without = f", {nothing} {have} nothing to check (healthd check lists them)" if nothing else ""
        return ok_line("checks", f"{len(all_results) - nothing} of {len(all_results)} can check this node{without}")
    if len({result.error for result in failed}) == 1:
        reasons, more = failed[0].error, ""
    else:
        reasons = "; ".join(f"{result.run}: {result.error}" for result in failed[:MAX_NAMED])
        more = f"; and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
    fix = ("healthd check",) if environment.is_root else ("sudo healthd doctor",)
    return limited_line("checks", f"{len(failed)} of {len(results)} other checks cannot run: {reasons}{more}", *fix)
