"""healthd's data model: immutable values without behaviour.

fault on the node -> Finding -> Condition -> Verdict -> Decision -> Slurm drains -> repaired -> Slurm resumes

Times are in seconds since the epoch (`Moment` in fields that the ledger keeps), and durations in seconds. PCI addresses
are written as in sysfs: lower-case `dddd:bb:dd.f` ("0000:1b:00.0").
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, TypeAlias

from msgspec import field

from healthd.common.moments import Moment, PastMoment
from healthd.common.values import Value, Whole


class Severity(enum.IntEnum):
    """Effect of a finding on the node. "Unknown" is not a severity: see Outcome and Health."""

    INFO = 0  # only recorded
    WARNING = 1  # an engineer should investigate; never changes anything in Slurm
    DEGRADED = 2  # drain; running jobs finish
    CRITICAL = 3  # drain now and requeue


class Health(enum.Enum):
    """Health of the node. From worst to best: UNHEALTHY, DEGRADED, UNKNOWN, WARNING, HEALTHY.

    A fault that drains takes precedence over a failed run of a check, which in turn takes precedence over WARNING and
    HEALTHY.
    """

    HEALTHY = "healthy"
    WARNING = "warning"
    UNKNOWN = "unknown"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


class Mode(enum.Enum):
    OBSERVE = "observe"  # never changes anything in Slurm
    DRAIN = "drain"
    ACT = "act"  # drain, and requeue the jobs that a CRITICAL fault hit


class Requeue(enum.Enum):
    """The batch jobs that a CRITICAL fault requeues (agent/slurm/affected_jobs.py)."""

    PART = "part"  # the jobs that use the broken part
    NODE = "node"  # all jobs on the node


class Outcome(enum.Enum):
    """Outcome of a run of a check. Only a COMPLETED run is evidence of health."""

    COMPLETED = "completed"
    FAILED = "failed"  # raised, crashed, or returned an invalid reply
    TIMED_OUT = "timed_out"  # its deadline passed
    STUCK = "stuck"  # not started, because a hung worker still uses the same resource


class Clears(enum.Enum):
    """The event that ends a condition."""

    PASS = "pass"  # `clear_after` completed runs in a row without the finding
    WINDOW = "window"  # `window_seconds` without a repeat, under load or after a repair (shared cause: any time)
    GPU_RESET = "gpu_reset"  # evidence of a GPU reset, or of a reboot
    REBOOT = "reboot"  # a different boot id
    OPERATOR = "operator"  # `healthd repaired CODE [PART]`


class Ending(enum.Enum):
    """The way in which a condition ended. `Clears` is the expected ending, but a condition may also end in another
    way.
    """

    PASS = "pass"  # completed runs without the finding
    WINDOW = "window"  # no repeat in its window
    RESET = "reset"  # evidence of a reset of the part (a check's `Repair`)
    REBOOT = "reboot"  # a different boot id, or evidence of a reboot
    REPAIRED = "repaired"  # `healthd repaired`
    RECOVERED = "recovered"  # a kernel line reports that the fault is over
    RENAMED = "renamed"  # the part has a new name, and a condition under that name replaces this one
    UNCHECKED = "unchecked"  # its check no longer runs: not configured, or only on an idle node


class Remedy(enum.Enum):
    """Remedy for a condition, to be applied by an engineer. agent/reporting/next_steps.py has the commands."""

    NOTHING = "nothing"  # no immediate action, because the condition ends by itself
    CHECK = "check"  # fix the cause; the check then passes
    GPU_RESET = "gpu_reset"
    REBOOT = "reboot"
    POWER_CYCLE = "power_cycle"  # a warm reboot may not change the part's state
    REPAIRED = "repaired"  # replace or repair the part, then `healthd repaired CODE PART`


class RepairMode(enum.Enum):
    """What healthd does about the repair of a drained node."""

    OFF = "off"
    ADVISE = "advise"  # report the step that the node needs
    ACT = "act"  # take the step


class RepairStep(enum.Enum):
    """Steps of the repair ladder, in this order (agent/repair/ladder.py)."""

    GPU_RESET = "gpu_reset"
    REBOOT = "reboot"
    POWER_CYCLE = "power_cycle"
    PERSON = "person"


LADDER = tuple(RepairStep)


class RepairClaim(Value, frozen=True):
    """The note that a repair adds to the Reason of healthd's drain, so that all nodes see it in Slurm.

    step            the claimed step. PERSON: the repair has failed and a person must act; this is not counted. None: no
                    claim
    max_concurrent  repairs in the cluster at the same time: a number, or a percentage of its nodes ("2%")
    is_booted       True if healthd's own step has booted this machine, so that DOWN in Slurm may be a result of it
    """

    step: RepairStep | None
    max_concurrent: int | str = 1
    is_booted: bool = False


class ClaimHold(Value, frozen=True):
    """A claim that waits, because other nodes are being repaired or cannot be counted.

    until    when the claim is tried again (epoch seconds)
    times    number of tries so far
    problem  why it waits, as one sentence
    """

    until: Moment
    times: Whole
    problem: str


class Ends(Value, frozen=True):
    """The event that ends a finding.

    `window` is the check's setting for the time without a repeat, or "". That time also ends the finding, and is the
    only ending if `clears` is WINDOW.
    """

    clears: Clears
    window: str = ""


class ObservationKind(enum.Enum):
    GAUGE = "gauge"
    COUNTER = "counter"


class Observation(Value, frozen=True):
    """A number that a check read.

    The name is that of the Prometheus metric without the `healthd_` prefix (base units; counters end in `_total`).
    `bits` is the width at which a counter wraps or saturates (None: 64-bit or unknown).
    """

    name: str
    value: float
    kind: ObservationKind = ObservationKind.GAUGE
    labels: tuple[tuple[str, str], ...] = ()
    bits: Whole | None = None


class Meaning(NamedTuple):
    """Description of an observation with unit and range: the HELP text for its metric.

    `labels` contains the names of all its labels.
    """

    text: str
    labels: tuple[str, ...] = ()


class Worsens(Value, frozen=True):
    """Escalation: a finding that lasts for `after_seconds` gets this severity."""

    after_seconds: float
    severity: Severity


class Slowness(Value, frozen=True):
    """A measured slowdown, whose cost can be computed from all nodes' events.

    slowdown  how much longer an iteration takes than before: 0.26 = 26 % longer; for several jobs, the largest
    onset     the first slow iteration (epoch seconds)
    jobs      the slow Slurm jobs on this node, as the kernel's cgroups name them
    """

    slowdown: float
    onset: Moment
    jobs: tuple[str, ...] = ()


class FoundSeverity(Value, frozen=True):
    """The severity that a check reported, before the site's settings changed it."""

    severity: Severity
    worsens: Worsens | None = None


class Program(NamedTuple):
    """A command that a check requires before a drained node is resumed.

    The command is `healthd` with these `arguments`, and is killed after `seconds`.
    """

    arguments: tuple[str, ...]
    seconds: float


class RunName(NamedTuple):
    """Name of a run: a check and one of its instances, or "" for a check without instances."""

    check: str
    instance: str = ""

    def __str__(self) -> str:
        return " ".join(self).strip()


class ConditionKey(NamedTuple):
    """Key of a condition: a code and a part. The part is "" for the node itself."""

    code: str
    subject: str

    def __str__(self) -> str:
        return " ".join(self).strip()


class Finding(Value, frozen=True):
    """A problem with one part.

    code      a stable name that begins with the check's name: "gpu_xid/79"
    subject   the part, with a name that every source can use: a PCI address, a mount point, "mlx5_0/1"; "" for the
              node
    confirm_seconds   how long the problem must last before the condition opens
    confirmed_by      codes of conditions from the kernel log. If the kernel log reported one of them in the last ten
                      minutes, on the same part ("" = on any part), and no operator has acknowledged it since, this
                      finding counts at once
    window_seconds    for WINDOW: the time without a repeat. With GPU_RESET, REBOOT or OPERATOR it is an alternative
                      ending ("reset, or 24 h without a repeat"); 0 = no such ending
    evidence  the observed state ("failure flag 1"): an acknowledged fault stays acknowledged until this text changes.
              "" = nothing to compare, so every failed run counts again
    events    sequence numbers of the kernel events behind the finding (correlate only)
    shared_cause   one external cause can produce the finding on every node at once (file server, driver mismatch)
    expects   the check's setting with the expected value ("expected"), or "". If a profile of the machine's
              type guessed that setting, the finding warns and never drains
    relapse_seconds   if the finding returns within this time after it cleared, only an operator clears it; 0 = never,
                      except for REBOOT
    recovered   the newest event reports the end of the problem ("nfs: server X OK"). This ends a condition that needs
                no reset, reboot or operator. It never opens a condition (correlate only)
    log_sets_severity   the kernel logs each occurrence with more detail than this count. If such lines have arrived
                        since the last run that reported the finding, their severity is used
    found_severity   the severity before the site's settings changed it (absorb.as_configured)
    slowness  the measured slowdown, for slow jobs only
    """

    severity: Severity
    code: str
    subject: str
    message: str
    clears: Clears = Clears.PASS
    confirm_seconds: float = 0.0
    window_seconds: float = 0.0
    worsens: Worsens | None = None
    evidence: str = ""
    events: tuple[Whole, ...] = ()
    shared_cause: bool = False
    expects: str = ""
    relapse_seconds: float = 0.0
    recovered: bool = False
    log_sets_severity: bool = False
    found_severity: FoundSeverity | None = None
    confirmed_by: tuple[str, ...] = ()
    slowness: Slowness | None = None

    @property
    def key(self) -> ConditionKey:
        """The key of the condition that this finding opens."""
        return ConditionKey(self.code, self.subject)


class NothingToCheck(Value, frozen=True):
    """Result of a check that has nothing to check on this node. The run completes, but is not listed as passed.

    reason  a noun phrase: "no NVIDIA GPU"
    fix     a command that gives it something to check: "healthd baseline --write", or "" if no action is needed
    """

    reason: str
    fix: str = ""


NO_GPU = NothingToCheck("no NVIDIA GPU")
NO_IB_PORT = NothingToCheck("no InfiniBand or RoCE port")
NOT_IN_BASELINE = NothingToCheck("not in the settings or the baseline", "healthd baseline --write")


class Repair(Value, frozen=True):
    """Evidence that a part was reset. A repair ends conditions that wait for `clears` and have not been seen since
    `before`.

    `before` is the time of the earlier reading with which the evidence is compared (epoch seconds; the start of its
    run, as in Condition.last_level_seen). An event between the reset and the reading that shows the reset is therefore
    never cleared by mistake.
    """

    clears: Clears
    subject: str
    message: str
    before: float


class KernelEvent(Value, frozen=True):
    """Content of one kernel line, or of several lines about one fault.

    kind      xid, sxid, pcie_aer, mlx5, ... (agent/kernel_log/rules/ has them)
    code      the code within the kind ("79"), or ""
    pci       the address in sysfs form, "" if the line has none
    time      time of the first line; `last_time`: time of the last line; `lines`: number of coalesced lines
    sequence  number that the ledger assigns (1, 2, 3, ...) and never reuses; 0 = not yet recorded
    history   True if the line was in the log before healthd first read it; it is recorded without any effect
    observed  True if users can forge lines in the event's source (a followed file); it is displayed without any effect
    fields    all other parsed values, such as (("link", "28"), ("fatal", "true"))
    uptime    seconds from the boot to the first line; None if the source does not have it
    """

    kind: str
    code: str = ""
    pci: str = ""
    time: Moment = 0.0
    text: str = ""
    pid: Whole | None = None
    process: str | None = None
    fields: tuple[tuple[str, str], ...] = ()
    boot_id: str = ""
    last_time: Moment = 0.0
    lines: Whole = 1
    sequence: Whole = 0
    history: bool = False
    uptime: float | None = None
    observed: bool = False

    def field(self, name: str) -> str:
        """Return one of `fields`, or "" if the line does not have it."""
        return dict(self.fields).get(name, "")


class CheckResult(Value, frozen=True):
    """Result of one run of one check.

    instance              "" or the named instance ("/data" for mount, a name for exec)
    dropped_observations  number of observations beyond the maximum, which are not kept
    nothing_to_check      why the run had nothing to check; None if it had something
    """

    check: str
    instance: str
    outcome: Outcome
    started: float
    duration_seconds: float
    findings: tuple[Finding, ...] = ()
    observations: tuple[Observation, ...] = ()
    repairs: tuple[Repair, ...] = ()
    error: str = ""
    dropped_observations: int = 0
    nothing_to_check: NothingToCheck | None = None

    @property
    def run(self) -> RunName:
        return RunName(self.check, self.instance)


class WorsensBy(Value, frozen=True):
    """The check's setting for the time after which a finding worsens, and the new severity."""

    setting: str
    severity: Severity


class Explain(Value, frozen=True):
    """Texts for `healthd explain CODE`, written for an engineer who was woken by an alert.

    `meaning` says what was observed. `matters` describes the effect on jobs. `todo` says what an engineer must do.
    healthd's own reaction and the ending follow from `severity` and `clears`, and from properties that all findings
    with this code share:

      severity   the findings' worst severity
      also       other severities of the findings; the texts explain which finding has which
      chosen_by  the check's setting for the severity, or ""
      confirm    the setting for the confirmation time, or "" if it counts at once
      at_once    True if some findings still count at once
      worsens    how a finding that lasts gets worse, or None
      shared     other nodes may have the same cause (Finding.shared_cause); None: only for some findings
      expects    the setting with the expected value (Finding.expects), or ""
      needs      the setting without which this is not checked, or ""
      window     the setting for the time without a repeat that ends it (Finding.window_seconds), or ""
      milder     the ending for findings in `also` that only warn; None: the same
      recorded   the ending for findings in `also` that are only recorded (INFO); None: the same as `milder`
      remedy     what an engineer must do; None: follows from `clears` (agent/reporting/endings.py)
      line_decides   True if the kernel line names the remedy; without the line, no command is printed
    """

    severity: Severity
    clears: Clears
    meaning: str
    matters: str
    todo: str
    also: tuple[Severity, ...] = ()
    chosen_by: str = ""
    confirm: str = ""
    at_once: bool = False
    worsens: WorsensBy | None = None
    shared: bool | None = False
    expects: str = ""
    needs: str = ""
    window: str = ""
    milder: Ends | None = None
    recorded: Ends | None = None
    remedy: Remedy | None = None
    line_decides: bool = False


class ConditionState(enum.Enum):
    PENDING = "pending"  # not yet confirmed: has lasted less than its confirm_seconds
    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"  # open, but accepted by an operator, so it triggers nothing
    CLEARED = "cleared"


class Ack(Value, frozen=True):
    """Acknowledgement by `healthd ack`, in force from `requested_at` to `until`.

    `severity` is the worst severity that the ack covers.
    """

    until: Moment
    why: str
    user: str
    severity: Severity
    requested_at: Moment = 0.0


# Kernel events for which a check raised an exception, with that exception. The event is None if the check only raised
# the exception for several events together.
Failures = tuple[tuple[KernelEvent | None, Exception], ...]


class Condition(Value, frozen=True):
    """A recorded problem in the ledger.

    severity         the current severity: as reported, capped by settings, and worsened
    found_severity   the reported and worsened severity, before the site's settings; None: equal to `severity`
    expects          the check's setting with the expected value, or ""
    shared_cause     other nodes may have the same cause. It changes to False only after reports without a shared cause
                     for `confirm_seconds`
    own_since        first of the successive reports without a shared cause (0 if the last report had one)
    first_seen       first finding; `persists_since` restarts after a clean run
    worsened_at      when a milder or acknowledged condition last became a fault that drains, before the site's settings
                     (0: since first_seen)
    critical_at      when it became open and CRITICAL (0 if never); jobs that started later were not hit
    switch_side_at   time of the CRITICAL Xid for which all GPUs of a rack's tray have shown the same fault (0: none)
    count            number of kernel events, or of completed runs with the finding
    last_level_seen  start of the last run with the finding, for a check that reads the state itself (0 if never); its
                     readings have this time in the check's history
    last_event       time of the last kernel event on which it is based (0 if never)
    acknowledged_at  when an operator resumed the node (0 if never); after that, the condition takes effect only on new
                     evidence
    ack              acknowledgement with a time limit: until then the condition stays acknowledged, regardless of new
                     evidence, unless its severity rises
    clean_runs       number of completed runs in a row without the finding
    quiet_seconds    time without a repeat that has counted towards its window
    repaired         True if a reset or a reboot followed the last evidence; its window then also runs without load
    history          True if it is based only on lines that were logged before healthd's first start
    observed         True if it is based only on lines from a source that users can forge; it then never drains and
                     never delays a resume
    boot_id          the boot in which it was last seen
    ending           how it ended (None: still open); `cleared_by` says the same as text, with the user or the evidence
    job              Slurm job that caused it, if known
    slowness         the last measured slowdown; None for conditions that are not slowness
    """

    check: str
    instance: str
    code: str
    subject: str
    severity: Severity
    message: str
    clears: Clears
    state: ConditionState
    first_seen: Moment
    last_seen: Moment
    count: Whole
    boot_id: str
    confirm_seconds: float = 0.0
    window_seconds: float = 0.0
    worsens: Worsens | None = None
    evidence: str = ""
    shared_cause: bool = False
    own_since: Moment = 0.0
    last_level_seen: Moment = 0.0
    last_event: Moment = 0.0
    last_sequence: Whole = 0
    acknowledged_at: PastMoment = 0.0
    acknowledged_evidence: str = ""
    persists_since: Moment = 0.0
    opened_at: Moment = 0.0
    worsened_at: Moment = 0.0
    critical_at: Moment = 0.0
    switch_side_at: Moment = 0.0
    cleared_at: Moment = 0.0
    cleared_by: str = ""
    ending: Ending | None = None
    clean_runs: Whole = 0
    quiet_seconds: float = 0.0
    repaired: bool = False
    history: bool = False
    job: str = ""
    found_severity: Severity | None = None
    expects: str = ""
    ack: Ack | None = None
    observed: bool = False
    slowness: Slowness | None = None

    @property
    def key(self) -> ConditionKey:
        return ConditionKey(self.code, self.subject)

    @property
    def run(self) -> RunName:
        """The name of the run that reported it."""
        return RunName(self.check, self.instance)


class Verdict(Value, frozen=True):
    """The node's health and the reasons for it, on which all decisions and reports are based.

    causes        open DEGRADED or CRITICAL conditions that may drain, worst first
    fault_time    when the newest CRITICAL cause last happened (jobs that started later were not hit), or 0
    unknown       why the node cannot be reported as healthy: one sentence for each check that failed to run
    may_resume    True if all checks that a resume requires completed clean, and no unacknowledged condition >= DEGRADED
                  is open
    before_resume text about a program that must run on the idle node before a resume, or ""
    """

    health: Health
    conditions: tuple[Condition, ...] = ()
    causes: tuple[Condition, ...] = ()
    unknown: tuple[str, ...] = ()
    may_resume: bool = False
    fault_time: float = 0.0
    before_resume: str = ""


class Drain(Value, frozen=True):
    """Decision to drain. `not_requeued` lists running jobs that are not requeued, as (job, why)."""

    reason: str
    requeue: bool
    not_requeued: tuple[tuple[str, str], ...] = ()


class Resume(Value, frozen=True):
    why: str


class Leave(Value, frozen=True):
    """Decision to change nothing. `would` is the action that healthd would take in `mode = "act"` without a pause, or
    "".
    """

    why: str
    would: str = ""


Decision: TypeAlias = "Drain | Resume | Leave"


class Gpu(Value, frozen=True):
    """A GPU with NVML's number, which is only displayed. Faults are keyed by the PCI address.

    Its device node is /dev/nvidiaMINOR (`minor` is None if it is unknown). `mig` contains its MIG devices' UUIDs, in
    NVML's order. `serial` is the number of its board, which both GPUs of a dual-GPU board share, or "" if unknown.
    """

    pci: str
    index: Whole
    uuid: str = ""
    name: str = ""
    minor: Whole | None = None
    mig: tuple[str, ...] = ()
    serial: str = ""


class PciDevice(Value, frozen=True):
    """A device from sysfs. `kind` is gpu, nvswitch, nic, nvme or other. `upstream` is the port above it."""

    pci: str
    vendor: str
    device: str
    pci_class: str
    kind: str
    upstream: str = ""
    slot: str = ""
    name: str = ""


class Disk(Value, frozen=True):
    """A disk or an NVMe controller by its kernel name ("nvme0n1", "nvme0", "sda").

    `pci` is its own PCI device or the one above it, or "". `ids` are the serial number and wwid from sysfs.
    """

    name: str
    pci: str = ""
    ids: tuple[str, ...] = ()


class LocalMount(Value, frozen=True):
    """The first mount of a local file system.

    `device` is the kernel name ("dm-0", "nvme0n1p1"), and `disks` are the disks below it. `redundant` are disks that
    another copy or path can replace.
    """

    point: str
    fstype: str
    device: str
    disks: tuple[str, ...] = ()
    redundant: tuple[str, ...] = ()


class Inventory(Value, frozen=True):
    """This node's hardware, for correlate() and for display.

    domain  UUID of the NVLink domain that the GPUs have joined, which may span several nodes; "" if they have joined
            none, or None if this is unknown. The ledger keeps the last UUID that was read
    """

    gpus: tuple[Gpu, ...] = ()
    devices: tuple[PciDevice, ...] = ()
    driver_version: str = ""
    dmi_product: str = ""
    disks: tuple[Disk, ...] = ()
    mounts: tuple[LocalMount, ...] = ()
    domain: str | None = None

    @property
    def is_complete(self) -> bool:
        """Return True if sysfs listed the devices. Devices from another machine's log have no PCI class."""
        return any(device.pci_class for device in self.devices)


class NodeState(Value, frozen=True):
    """This node as Slurm shows it.

    flags        State in upper case, split at "+" ({"IDLE", "DRAIN"})
    reason_time  Slurm's time stamp for the Reason, or 0
    partitions   the node's partitions
    gpu_count    number of gres/gpu, or None if unknown
    single_type_gpu_count    the same, but None if the GPUs have several types
    drained_by_own_prolog    True if Slurm drained the node because healthd's own prolog refused a job
    unread_rows  number of sinfo rows for this node that could not be read; `partitions` may then be incomplete
    """

    name: str
    flags: frozenset[str]
    reason: str = ""
    reason_user: str = ""
    reason_time: float = 0.0
    partitions: frozenset[str] = frozenset()
    gpu_count: int | None = None
    drained_by_own_prolog: bool = False
    single_type_gpu_count: int | None = None
    unread_rows: int = 0


class UnaffectedJob(Value, frozen=True):
    """A running job that no GPU fault has hit so far. The job continues, and is not looked up in Slurm again.

    id     the number that its processes have; `name`: the argument for a requeue
    start  start of this run, epoch seconds
    allocated_gpus  this node's GPUs that Slurm allocated to it (gres.AllocatedGpus)
    """

    id: str
    name: str
    start: float
    allocated_gpus: tuple[str, ...]
    why: str


class SentRequeue(Value, frozen=True):
    """A requeue that was sent or is about to be sent. It is never repeated for the same (job, restarts)."""

    job: str
    restarts: Whole
    time: Moment


MAX_HOLD_SECONDS = 3600.0  # maximum time between two attempts to set a drain that the fleet limit delays


class FleetHold(Value, frozen=True):
    """A desired drain that is delayed by the fleet limit (fleet_limit.py).

    since         when the wait started
    until         when to try next
    times         number of attempts in a row that the limit prevented; 0 = the first wait, before any count
    own_hardware  True if the limit for faults of the node's own hardware applies
    partition     the partition with the least room at the last count; followed by its number of nodes, how many of them
                  healthd keeps drained, and the limit
    domain        short id of the NVLink domain, if its limit applies instead of a partition's. `partition` is then "",
                  and `nodes` is 0, because Slurm does not show the size of a domain
    """

    since: Moment
    until: Moment
    times: Whole = 0
    own_hardware: bool = False
    partition: str = ""
    nodes: Whole = 0
    drained: Whole = 0
    limit: Whole = 0
    domain: str = ""


class PartitionCount(Value, frozen=True):
    """A partition's size, and the number of its nodes that healthd keeps drained.

    With `is_domain`, the count is for this node's NVLink domain instead: `name` is its short id, and `nodes` is 0.
    """

    name: str
    nodes: Whole
    drained: Whole
    is_domain: bool = False


class FleetCount(Value, frozen=True):
    """A complete count of this node's partitions, at `time` (epoch seconds)."""

    time: Moment
    partitions: tuple[PartitionCount, ...]


class EndedDrain(Value, frozen=True):
    """A drain by healthd that has ended, or whose Reason healthd replaced.

    reason       healthd's text
    node_reason  the Reason on the node, without the text that Slurm appends
    reason_time  Slurm's time stamp for that Reason, or 0 if unknown
    ended_at     when the drain ended
    is_saved     True if the node was read again late enough that slurmctld can no longer lose the end of the drain
    controller   the slurmctld that answered when healthd ended or replaced the drain; "" if others ended it or it is
                 saved; policy.UNKNOWN_CONTROLLER if it could not be read
    """

    reason: str
    node_reason: str
    reason_time: float
    ended_at: PastMoment
    is_saved: bool = False
    controller: str = ""


class UnsavedChange(Value, frozen=True):
    """A change by healthd to the node that slurmctld may not have saved yet.

    sent_at     when it was sent, epoch seconds
    controller  the slurmctld that answered right before the change (output.parse_controller);
                policy.UNKNOWN_CONTROLLER if it could not be read
    """

    sent_at: PastMoment
    controller: str


class ResumedDrain(Value, frozen=True):
    """A drain that healthd lifted, with the start of the drain and the time of the resume (epoch seconds)."""

    drained_at: Moment
    resumed_at: Moment
    own_hardware: bool


class DrainRecord(Value, frozen=True):
    """healthd's own drains of this node. The ledger keeps this record across restarts.

    reason        healthd's text as last read on the drained node, or "" if there is none
    pending_reason  healthd's text that was sent (or is about to be sent) but not read back yet, or "". It is
                    recorded before the command, so that a drain is recognised even if the daemon was killed
    pending_since   when `pending_reason` was sent
    overriding_reason  an operator's Reason that replaced healthd's, or ""
    adopted_reason  a Reason in healthd's format that is not in this ledger (an earlier healthd's), or ""
    confirmed_at  when the node was last read as drained by reason, overriding_reason or adopted_reason (0 if never)
    boot_id       this machine's boot at that reading
    reboot_pending  True if a reboot or a power change was pending in Slurm at that reading
    resume_sent_at  when healthd sent a resume whose effect was not read back yet (0 if none); if a drain disappears
                    after that, no operator ended it
    hold          a drain that the fleet limit delays
    awaits_count  True if the drain was not counted yet after it was set; it is lifted if the fleet limit is exceeded
    ended_drain   healthd's last drain, after it ended
    reason_time   Slurm's time stamp for `reason`, as last read, or 0 if unknown
    earlier_drains  drains before `reason` and `ended_drain`, oldest first; if slurmctld returns with an older state, it
                    restores one of them
    drained_at    when healthd's current drain started (0 if none)
    own_hardware  True if a fault of the node's own hardware was among its causes
    clean_seconds  how long the drain had been kept only because of flapping, at the last reading; an open fault resets
                   it
    clean_since   start of the current clean period, not yet in clean_seconds (0 = not clean at the last reading)
    resumed_drains  the last drains that healthd lifted, oldest first, until an operator repairs or resumes the node
                    (flapping.py)
    unaffected_jobs  jobs that the faults did not hit, while a CRITICAL fault is open
    prolog_drain_time  Slurm's time stamp for the drain after healthd's own prolog refused a job, or 0
    unsaved_change  healthd's last change to the node, until slurmctld has certainly saved it: a backup slurmctld that
                    takes over before that does not have it
    stored_count  the last complete count of the fleet, which can replace a failed one (fleet_limit.py)
    count_failing_since  since when a drain is desired or set but the fleet cannot be counted (0 = it can be counted, or
                         need not be)
    count_failed_at  when the last count failed, or 0 if none has failed since a complete one
    claim         the claimed step of a repair, once it stands in the Reason and has been counted, or None
    claim_hold    why a claim waits
    """

    reason: str = ""
    pending_reason: str = ""
    pending_since: Moment = 0.0
    overriding_reason: str = ""
    adopted_reason: str = ""
    confirmed_at: Moment = 0.0
    boot_id: str = ""
    reboot_pending: bool = False
    resume_sent_at: Moment = 0.0
    sent_requeues: tuple[SentRequeue, ...] = ()
    hold: FleetHold | None = None
    awaits_count: bool = False
    ended_drain: EndedDrain | None = None
    reason_time: float = 0.0
    earlier_drains: tuple[EndedDrain, ...] = ()
    drained_at: PastMoment = 0.0
    own_hardware: bool = False
    clean_since: PastMoment = 0.0
    clean_seconds: float = 0.0
    resumed_drains: tuple[ResumedDrain, ...] = ()
    unaffected_jobs: tuple[UnaffectedJob, ...] = ()
    prolog_drain_time: float = 0.0
    unsaved_change: UnsavedChange | None = None
    stored_count: FleetCount | None = None
    count_failing_since: PastMoment = 0.0
    count_failed_at: PastMoment = 0.0
    claim: RepairStep | None = None
    claim_hold: ClaimHold | None = None


# --- a node's hardware, for its baseline


class Baseline(NamedTuple):
    """A check's settings that `healthd baseline` writes, in this order. `place` is the table's rank, lowest first."""

    settings: tuple[str, ...]
    place: int = 100


class Entry(Value, frozen=True):
    """One setting of a baseline.

    If the setting is a table, this is one of its keys (`key`). If it is a list, this is one of its items. `note` is a
    description for the reader.
    """

    check: str
    setting: str
    value: Any = True
    key: str = ""
    instance: str = ""
    note: str = ""


class LeftOut(Value, frozen=True):
    """A setting, entry or check that a baseline omits, and the reason.

    If `key` is "", the whole setting is omitted. If `setting` is "", so is the whole check. `unread` is True if the
    part could not be read, so that its presence is unknown. Otherwise the part is present but appears broken.
    """

    check: str
    why: str
    setting: str = ""
    key: str = ""
    instance: str = ""
    unread: bool = False

    @property
    def unseen(self) -> bool:
        """True if the part could not be read. This includes a check without any entry."""
        return self.unread or not (self.setting or self.instance)


# --- status of the daemon's parts


class KernelLogStatus(Value, frozen=True):
    """Status of the kernel log source.

    `alive` is True if the source is open and being read. `lost` is the number of lines that were overwritten before
    they were read. `malformed` is the number of records that were invalid or too long. `rotations` is the number of
    times that the file was replaced or truncated. If `observed`, users can forge the source's lines, so the lines are
    displayed without any effect.
    """

    source: str
    alive: bool
    lines_total: int = 0
    events_total: int = 0
    lost_total: int = 0
    overruns_total: int = 0
    restarts_total: int = 0
    malformed_total: int = 0
    rotations_total: int = 0
    last_line: float = 0.0
    problem: str = ""
    observed: bool = False


class SourceStatus(Value, frozen=True):
    """Status of one source: kernel_log, journal (which fills gaps in the ring buffer) or device_removals.

    `up` is True if the source is open and the last read succeeded. `last_read` is the time of the last successful read,
    or 0. `restarts` is the number of attempts to reopen the source. `overruns` is the number of times that data was
    lost.
    """

    source: str
    up: bool
    last_read: float = 0.0
    restarts_total: int = 0
    overruns_total: int = 0
    lost_total: int = 0
    malformed_total: int = 0
    rotations_total: int = 0
    problem: str = ""


class StreamStatus(Value, frozen=True):
    """Status of the event stream.

    `waiting` is the number of lines that are not yet on disk, and `dropped_total` the number that did not fit.
    `failures_total` is the number of failed writes, and `journal_lost_total` the number of lines that the journal did
    not accept.
    `problem` is a sentence with the reason why nothing can be written.
    """

    waiting: int = 0
    dropped_total: int = 0
    failures_total: int = 0
    journal_lost_total: int = 0
    problem: str = ""


class SlurmStatus(Value, frozen=True):
    """The node's state in Slurm, as last read. `problem` is a sentence with the reason why the state could not be read
    or changed.
    """

    node: NodeState | None = None
    owner: str = ""
    read_at: float = 0.0
    problem: str = ""
    commands: dict[tuple[str, str], int] = field(default_factory=dict)  # ("scontrol update", "ok") -> count


class RoundStatus(Value, frozen=True):
    number: int = 0
    started: float = 0.0
    seconds: float = 0.0
    next_at: float = 0.0
