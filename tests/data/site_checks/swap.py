"""Check whether an idle node swaps, or has a GPU that does not answer."""

from healthd.api import CheckConfig, Clears, Explain, Finding, History, Host, NvmlError, NvmlErrorKind, Severity

Config = CheckConfig
USES = "nvml"
WHEN = "idle"


def run(host: Host, config: CheckConfig, past: History):
    for gpu in host.gpus():
        try:
            gpu.temperature()
        except NvmlError as error:
            if error.kind is NvmlErrorKind.GPU_LOST:
                yield Finding(Severity.WARNING, "swap/gpu", gpu.pci, "does not answer")
    for line in (host.read("/proc/swaps") or "").splitlines()[1:]:
        yield Finding(Severity.WARNING, "swap/used", line.split()[0], "is in use")


EXPLAIN = {
    "swap/used": Explain(Severity.WARNING, Clears.PASS, "The node swaps.", "It is slow.", "smem -rs swap"),
    "swap/gpu": Explain(Severity.WARNING, Clears.PASS, "A GPU is silent.", "Its jobs fail.", "dmesg"),
}
