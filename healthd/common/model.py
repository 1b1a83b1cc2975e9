"""The words that healthd is written in: frozen values without behaviour.

fault on the node -> Finding -> Condition -> Verdict -> Decision -> Slurm drains -> repaired -> Slurm resumes

Times are seconds since the epoch (`Moment` in what the ledger keeps), durations are seconds, PCI addresses are written
as the kernel does in sysfs: lower-case `dddd:bb:dd.f` ("0000:1b:00.0").
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, TypeAlias

from msgspec import field

from healthd.common.moments import Moment, PastMoment
from healthd.common.values import Value, Whole


class Severity(enum.IntEnum):
    """What a finding means for the node. "Unknown" is not on this scale: see Outcome and Health."""

    INFO = 0  # recorded, nothing more
    WARNING = 1  # an engineer should look; never touches Slurm
    DEGRADED = 2  # drain; running jobs finish
    CRITICAL = 3  # drain now and requeue


class Health(enum.Enum):
    """The node's health. Precedence, worst first: UNHEALTHY, DEGRADED, UNKNOWN, WARNING, HEALTHY.

    A known fault that drains wins over a check that could not look; a check that could not look wins over
    warnings and over healthy.
    """

    HEALTHY = "healthy"
    WARNING = "warning"
    UNKNOWN = "unknown"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


class Mode(enum.Enum):
    OBSERVE = "observe"  # never changes anything in Slurm
    DRAIN = "drain"
    ACT = "act"  # drain, and requeue what a CRITICAL fault broke


class Requeue(enum.Enum):
    """Which batch jobs a CRITICAL fault requeues (agent/slurm/affected_jobs.py)."""

    PART = "part"  # those that the broken part serves
    NODE = "node"  # all on the node


class Outcome(enum.Enum):
    """How one run of a check ended. Only COMPLETED speaks about health."""

    COMPLETED = "completed"
    FAILED = "failed"  # raised, crashed, or answered nonsense
    TIMED_OUT = "timed_out"  # its deadline passed
    STUCK = "stuck"  # not started: a worker that still hangs holds what the check uses


class Clears(enum.Enum):
    """What ends a condition."""

    PASS = "pass"  # the check completes clean `clear_after` times running
    WINDOW = "window"  # nothing new for `window_seconds` under load or after repair; a shared cause: at any time
    GPU_RESET = "gpu_reset"  # evidence of a GPU reset, or of a reboot
    REBOOT = "reboot"  # another boot id
    OPERATOR = "operator"  # `healthd repaired CODE [PART]`


class Ending(enum.Enum):
    """How a condition ended. `Clears` is what a condition waits for; a condition may also end in another way."""

    PASS = "pass"  # clean runs of its check
    WINDOW = "window"  # nothing new in its window
    RESET = "reset"  # evidence of a reset of the part (a check's `Repair`)
    REBOOT = "reboot"  # another boot id, or evidence of a reboot
    REPAIRED = "repaired"  # `healthd repaired`
    RECOVERED = "recovered"  # a kernel line reports that the fault is over
    RENAMED = "renamed"  # the part got another name, and a condition of that name replaces this one
    UNCHECKED = "unchecked"  # its check no longer runs: not configured, or only on an idle node


class Remedy(enum.Enum):
    """What an engineer does about a condition (its commands: agent/reporting/next_steps.py)."""

    NOTHING = "nothing"  # no action tonight: it ends by itself
    CHECK = "check"  # mend the cause; the check then passes
    GPU_RESET = "gpu_reset"
    REBOOT = "reboot"
    POWER_CYCLE = "power_cycle"  # a warm reboot may leave the part as it is
    REPAIRED = "repaired"  # replace or repair the part, then `healthd repaired CODE PART`


class Ends(Value, frozen=True):
    """What ends a finding. `window`: the setting of the check with the time without a repeat that ends it as well, or
    the only way if `clears` is WINDOW; "" = no such time."""

    clears: Clears
    window: str = ""


class ObservationKind(enum.Enum):
    GAUGE = "gauge"
    COUNTER = "counter"


class Observation(Value, frozen=True):
    """One number that was read. Its name is a Prometheus metric's without the `healthd_` prefix (base units;
    counters end in `_total`). `bits` is the width at which a counter wraps or sticks (None: 64-bit or unknown).
    """

    name: str
    value: float
    kind: ObservationKind = ObservationKind.GAUGE
    labels: tuple[tuple[str, str], ...] = ()
    bits: Whole | None = None


class Meaning(NamedTuple):
    """What an observation's value says, with unit and range: the HELP of its metric. `labels`: all that it has."""

    text: str
    labels: tuple[str, ...] = ()


class Worsens(Value, frozen=True):
    """A finding that lasts `after_seconds` from its first sight is of this severity instead."""

    after_seconds: float
    severity: Severity


class Slowness(Value, frozen=True):
    """How slow something is, in numbers, so that what it costs can be counted where all nodes' events are.

    slowdown  how much longer an iteration takes than before: 0.26 = 26 % longer; of several jobs the largest
    onset     the first slow iteration (epoch seconds)
    jobs      the Slurm jobs on this node that are slow, as the kernel's cgroups name them
    """

    slowdown: float
    onset: Moment
    jobs: tuple[str, ...] = ()


class Found(Value, frozen=True):
    """How bad a check found something, before the site's settings changed it."""

    severity: Severity
    worsens: Worsens | None = None


class Program(NamedTuple):
    """What a check wants run before a drained node is resumed: `arguments` of `healthd`, and after how many `seconds`
    it is ended, whatever it does."""

    arguments: tuple[str, ...]
    seconds: float


class RunName(NamedTuple):
    """The name of a run: a check, and one of its instances ("" if it has none)."""

    check: str
    instance: str = ""

    def __str__(self) -> str:
        return " ".join(self).strip()


class ConditionKey(NamedTuple):
    """The key of a condition: a code, and the part that has it ("" = the node)."""

    code: str
    subject: str

    def __str__(self) -> str:
        return " ".join(self).strip()


class Finding(Value, frozen=True):
    """A problem with one part.

    code      stable, begins with the check's name: "gpu_xid/79", "mount/missing"
    subject   the part, keyed by what every source knows: a PCI address, a mount point, "mlx5_0/1"; "" = the node
    confirm_seconds   how long it must persist before it counts
    confirmed_by      codes of conditions from the kernel log: where one of the same part stands ("" = of any part) that
                      the log told minutes ago, and of which nobody knew by then, it counts at once
    window_seconds    for WINDOW: how long nothing new must be seen. With GPU_RESET, REBOOT or OPERATOR it is the
                      alternative way out ("reset, or 24 h clean"); 0 = no such way
    evidence  what the finding rests on ("failure flag 1"): a fault that an operator acknowledged stays
              acknowledged until this changes. "" = nothing to compare, so a failing check always counts again
    events    sequences of the kernel events that it rests on (correlate only)
    shared_cause   one outside cause can give it on every node at once (file server, driver mismatch)
    expects   the setting of the check that it compares with ("expected"), "" = none: if that setting was only guessed
              (by a profile of the machine's type), the finding warns and never drains
    relapse_seconds   if it is seen again within this time after it cleared, it waits for an operator; 0 = never,
              except for REBOOT
    over      the newest of its events is the log's own word that it ended ("nfs: server X OK"): it ends a condition
              that waits for no reset, reboot or operator, and never makes one (correlate only)
    log_decides   the kernel prints a line with each thing that this look counts, and the line says more: while one came
              since the last look that saw it, the severity of the lines stands
    found     its first severity, if the site's settings changed it (absorb.as_configured)
    slowness  how slow, where it is a slowness that was measured
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
    over: bool = False
    log_decides: bool = False
    found: Found | None = None
    confirmed_by: tuple[str, ...] = ()
    slowness: Slowness | None = None

    @property
    def key(self) -> ConditionKey:
        """The key of the condition that it becomes."""
        return ConditionKey(self.code, self.subject)


class NothingToCheck(Value, frozen=True):
    """A check has nothing to check on this node. Given instead of findings: such a run completes, and is not listed
    among those that passed.

    reason  why, as a noun phrase: "no NVIDIA GPU"
    fix     what lets it check something: "healthd baseline --write"; "" = nothing needs to be done
    """

    reason: str
    fix: str = ""


NO_GPU = NothingToCheck("no NVIDIA GPU")
NO_IB_PORT = NothingToCheck("no InfiniBand or RoCE port")
NOT_IN_BASELINE = NothingToCheck("not in the settings or the baseline", "healthd baseline --write")


class Repair(Value, frozen=True):
    """Evidence that a part was reset: it ends conditions that wait for `clears` and were not seen after `before`.

    `before` is the moment of the earlier reading that the evidence compares with (epoch seconds; when its run began,
    as in Condition.last_level_seen), so that an event between the reset and the reading that shows it is never cleared
    by mistake.
    """

    clears: Clears
    subject: str
    message: str
    before: float


class KernelEvent(Value, frozen=True):
    """What one kernel line (or several lines of one fault) says.

    kind      xid, sxid, pcie_aer, mlx5, ... (kernel/lines/ lists them)
    code      the number within the kind ("79"), "" if there is none
    pci       the address in sysfs form, "" if the line has none
    time      of the first line; `last_time` of the last one; `lines` how many were coalesced into it
    sequence  given by the ledger: 1, 2, 3, ... never reused; 0 = not yet recorded
    history   it was in the log before healthd ever looked at it: known, but no news
    observed  its source can be forged (a followed file): it is shown and decides nothing
    fields    everything else that was parsed: (("link", "28"), ("fatal", "true"))
    uptime    seconds from the boot to the first line; None where the source does not tell
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
        """One of `fields`; "" if the line does not have it."""
        return dict(self.fields).get(name, "")


class CheckResult(Value, frozen=True):
    """One run of one check. `instance` is "" or the named instance ("/data" of mount, the name of an exec). `left_out`:
    how many more observations it gave than are kept. `nothing`: why it had nothing to check, None if it had.
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
    left_out: int = 0
    nothing: NothingToCheck | None = None

    @property
    def run(self) -> RunName:
        return RunName(self.check, self.instance)


class WorsensBy(Value, frozen=True):
    """Which setting of the check says when its finding worsens, and to what."""

    setting: str
    severity: Severity


class Explain(Value, frozen=True):
    """What `healthd explain CODE` says about one code, to the engineer who is woken by it.

    meaning: what was seen; matters: why that is bad for jobs; todo: what an engineer should do.
    What healthd does and what ends it follow from `severity` and `clears`, and from what the findings of this code have
    in common, so that it is told before there is one:

    severity   the worst of them
    also       what others of them are; the texts say which
    chosen_by  the setting of the check that says its severity, "" = none does
    confirm    the setting that says how long it must last, "" = it counts at once
    at_once    some of its findings count at once all the same
    worsens    a finding that lasts gets worse
    shared     whether other nodes may have the same cause (Finding.shared_cause); None: some of its findings
    expects    the setting that it compares with (Finding.expects), "" = none
    needs      the setting without which nobody looks for it, "" = none
    window     the setting with the time without a repeat that ends it (Finding.window_seconds), "" = none
    milder     what ends those of its findings in `also` that only warn; None: the same
    recorded   what ends those in `also` that are only recorded (INFO); None: the same as `milder`
    remedy     what an engineer does about it; None: what follows from `clears` (agent/reporting/endings.py)
    line_decides   the kernel line names the remedy: without the line no command is given
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
    PENDING = "pending"  # seen, but not yet for its confirm time
    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"  # open, but an operator knows: it no longer acts
    CLEARED = "cleared"


class Ack(Value, frozen=True):
    """`healthd ack`: a person knows of a condition, from `given` to `until`. `severity`: how bad they know it."""

    until: Moment
    why: str
    who: str
    severity: Severity
    given: Moment = 0.0


# The events that a check fails on, and how; None: only on several of them together.
Failures = tuple[tuple[KernelEvent | None, Exception], ...]


class Condition(Value, frozen=True):
    """A finding that the ledger holds.

    severity         its severity now: as found, capped and worsened
    found            its severity as found and worsened, without the site's settings; None: equal to `severity`
    expects          the setting of the check that it compares with, "" = none
    first_seen       first sight; `persists_since` begins again after a clean run
    critical_at      when it became open and CRITICAL (0 = never): jobs that started later are not its victims
    count            kernel events, or completed runs that saw it
    last_level_seen  when the last run that saw it began, of a check that looks at the state itself (0 = never): the
                     moment of its readings in its past
    last_event       time of the last kernel event behind it (0 = never)
    acknowledged_at  when an operator resumed the node (0 = never): it may act only if it is seen later
    ack              a person knows of it for a while: until then it stays acknowledged, whatever is seen, unless its
                     severity rises
    clean_runs       completed runs in a row without it
    quiet_seconds    time without news that counted towards its window
    repaired         a reset or a reboot came after its last sight: its window also runs without load
    history          it rests only on lines that the log held before healthd's first start
    observed         it rests only on lines of a source that can be forged: it never drains and holds no resume
    boot_id          the boot in which it was last seen
    ending           how it ended (None: it did not); `cleared_by` is the same as text, with user or evidence
    job              Slurm job at the source, if known
    slowness         how slow, as the last sight had it; None: it is no slowness that was measured
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
    last_level_seen: Moment = 0.0
    last_event: Moment = 0.0
    last_sequence: Whole = 0
    acknowledged_at: PastMoment = 0.0
    acknowledged_evidence: str = ""
    persists_since: Moment = 0.0
    opened_at: Moment = 0.0
    critical_at: Moment = 0.0
    cleared_at: Moment = 0.0
    cleared_by: str = ""
    ending: Ending | None = None
    clean_runs: Whole = 0
    quiet_seconds: float = 0.0
    repaired: bool = False
    history: bool = False
    job: str = ""
    found: Severity | None = None
    expects: str = ""
    ack: Ack | None = None
    observed: bool = False
    slowness: Slowness | None = None

    @property
    def key(self) -> ConditionKey:
        return ConditionKey(self.code, self.subject)

    @property
    def run(self) -> RunName:
        """The run that found it."""
        return RunName(self.check, self.instance)


class Verdict(Value, frozen=True):
    """The node's health and the reasons, for everything that publishes or decides.

    causes        open conditions of DEGRADED or CRITICAL that may act, worst first
    fault_time    when the newest CRITICAL cause was last seen happening (jobs that started later are not its
                  victims); 0 = there is none
    unknown       why the node cannot be called healthy: one sentence for each check that could not look
    may_resume    every check that a resume waits for completed clean, and no condition >= DEGRADED stands that nobody
                  has acknowledged
    before_resume what a resume waits for besides, in words: a program that runs on the idle node; "" = nothing
    """

    health: Health
    conditions: tuple[Condition, ...] = ()
    causes: tuple[Condition, ...] = ()
    unknown: tuple[str, ...] = ()
    may_resume: bool = False
    fault_time: float = 0.0
    before_resume: str = ""


class Drain(Value, frozen=True):
    """`spared`: the running jobs that are not requeued, and why: (job, why)."""

    reason: str
    requeue: bool
    spared: tuple[tuple[str, str], ...] = ()


class Resume(Value, frozen=True):
    why: str


class Leave(Value, frozen=True):
    """Touch nothing. `would` says what `mode = "act"`, or healthd without a pause, would have done, if anything."""

    why: str
    would: str = ""


Decision: TypeAlias = "Drain | Resume | Leave"


class Gpu(Value, frozen=True):
    """A GPU as NVML names it, for people: faults are keyed by the PCI address. `minor`: its device node is
    /dev/nvidiaMINOR (None: not known). `mig`: the UUIDs of its MIG devices, in NVML's order."""

    pci: str
    index: Whole
    uuid: str = ""
    name: str = ""
    minor: Whole | None = None
    mig: tuple[str, ...] = ()


class PciDevice(Value, frozen=True):
    """A device from sysfs. `kind`: gpu, nvswitch, nic, nvme or other; `upstream` is the port above it."""

    pci: str
    vendor: str
    device: str
    pci_class: str
    kind: str
    upstream: str = ""
    slot: str = ""
    name: str = ""


class Disk(Value, frozen=True):
    """A disk or an NVMe controller as the kernel calls it ("nvme0n1", "nvme0", "sda"). `pci`: its own card or the card
    above it, "" = none; `ids`: its serial number and wwid, as sysfs has them."""

    name: str
    pci: str = ""
    ids: tuple[str, ...] = ()


class LocalMount(Value, frozen=True):
    """A file system on this node's disks, where it is mounted first. `device`: as the kernel calls it ("dm-0",
    "nvme0n1p1"); `disks`: the disks below it; `redundant`: those that another copy or path stands in for."""

    point: str
    fstype: str
    device: str
    disks: tuple[str, ...] = ()
    redundant: tuple[str, ...] = ()


class Inventory(Value, frozen=True):
    """What this node has: given to correlate() and to people."""

    gpus: tuple[Gpu, ...] = ()
    devices: tuple[PciDevice, ...] = ()
    driver_version: str = ""
    dmi_product: str = ""
    disks: tuple[Disk, ...] = ()
    mounts: tuple[LocalMount, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether sysfs listed the devices. What a log shows of another machine has no PCI classes."""
        return any(device.pci_class for device in self.devices)


class NodeState(Value, frozen=True):
    """This node as Slurm sees it: State split at "+", upper case ({"IDLE", "DRAIN"}). `reason_time`: 0 = none.
    `partitions`: those that it is in. `gpus`: how many gres/gpu it has there; None: not known. `refused_here`: Slurm
    drained it because healthd's own prolog refused a job. `gpus_of_one_type`: as `gpus`; None also where they are of
    several. `unread_rows`: rows of sinfo for this node that could not be read; `partitions` may then be incomplete."""

    name: str
    flags: frozenset[str]
    reason: str = ""
    reason_user: str = ""
    reason_time: float = 0.0
    partitions: frozenset[str] = frozenset()
    gpus: int | None = None
    refused_here: bool = False
    gpus_of_one_type: int | None = None
    unread_rows: int = 0


class Spared(Value, frozen=True):
    """A run of a job that no fault of GPUs has hit so far: it goes on, and Slurm is not asked again.

    id     the number that its processes have; `name`: the one that it is requeued by
    start  when this run began, epoch seconds
    given  what Slurm gave it of this node's GPUs (gres.Given)
    """

    id: str
    name: str
    start: float
    given: tuple[str, ...]
    why: str


class Requeued(Value, frozen=True):
    """One requeue that was sent or is about to be. It is never repeated for the same (job, restarts)."""

    job: str
    restarts: Whole
    time: Moment


LONGEST_HOLD_SECONDS = 3600.0  # between two tries of a drain that waits for the fleet


class FleetHold(Value, frozen=True):
    """A drain that is wanted and waits for the fleet (fleet_limit.py).

    since         when it began to wait
    until         when it is tried again
    times         how often in a row the limit has held it; 0 = this is the first wait, before any count
    own_hardware  whether that was the limit for faults of the node's own hardware
    partition     the strictest one at the last count; then its nodes, how many healthd held, how many it may hold
    """

    since: Moment
    until: Moment
    times: Whole = 0
    own_hardware: bool = False
    partition: str = ""
    nodes: Whole = 0
    drained: Whole = 0
    limit: Whole = 0


class PartitionCount(Value, frozen=True):
    """A partition: how many nodes it has, and how many of them healthd keeps drained."""

    name: str
    nodes: Whole
    drained: Whole


class FleetCount(Value, frozen=True):
    """A complete count of this node's partitions, at `time` (epoch seconds)."""

    time: Moment
    partitions: tuple[PartitionCount, ...]


class Lifted(Value, frozen=True):
    """A drain of ours that is over, whoever ended it, or that has other words of ours by now.

    reason   our text
    words    the Reason on the node, without what Slurm appends
    stamp    Slurm's time stamp of these words; 0 = not known
    time     when it was over
    saved    slurmctld was asked again so much later that it can no longer forget it
    controller  the slurmctld that answered when healthd ended or replaced it; "" = somebody else ended it, once it was
                saved; policy.UNKNOWN_CONTROLLER = could not be read
    """

    reason: str
    words: str
    stamp: float
    time: PastMoment
    saved: bool = False
    controller: str = ""


class Unsaved(Value, frozen=True):
    """A change of the node by healthd that slurmctld may not have saved yet.

    time        when it was sent, epoch seconds
    controller  the slurmctld that answered right before it (output.parse_controller); policy.UNKNOWN_CONTROLLER =
                could not be read
    """

    time: PastMoment
    controller: str


class Resumed(Value, frozen=True):
    """A drain of ours that we lifted: when it began to stand and when it was lifted (epoch seconds)."""

    drained_at: Moment
    time: Moment
    own_hardware: bool


class SlurmMemory(Value, frozen=True):
    """What healthd knows of its own drains of this node in Slurm; the ledger keeps it across restarts.

    reason        our text as last read on the drained node, "" = we hold no drain
    writing       our text that was sent (or is about to be) and not yet read back, "" = none: recorded before
                  the command, so that a drain by a daemon that was killed is still known as ours
    written_at    when `writing` was sent
    overruled     an operator's words that replaced our drain's, "" = none
    adopted       words in our form that this ledger does not know (an earlier healthd's), "" = none
    confirmed_at  when the node was last read as held by one of reason, overruled and adopted (0 = never)
    boot_id       this machine's boot at that reading
    rebooting     a reboot, or switching it off or on, was pending in Slurm at that reading
    resumed_at    when we asked Slurm for a resume that has not yet been seen to work (0 = none): a drain of ours
                  that is gone after that was not ended by an operator
    hold          a drain that the fleet limit holds back
    uncounted     our drain was not yet counted after it was set: beyond the fleet limit it is taken back
    lifted        our last drain that is over, while we hold none
    stamp         Slurm's time stamp of `reason`, as last read; 0 = not known
    earlier       drains of ours before `reason` and `lifted`, oldest first: a slurmctld that comes back from an older
                  state brings one of them back
    drained_at    when the drain that we hold began to stand (0 = we hold none)
    own_hardware  whether a fault of the node's own hardware was among its causes
    clean_seconds  for how long nothing but flapping kept it from being lifted, at the last look; a fault that stands
                  lets it begin anew
    clean_since   since when that has gone on, beyond clean_seconds (0 = at the last look it did not)
    resumed       the drains that we lifted last, oldest first, until a person answers for the node (flapping.py)
    spared        jobs that the faults did not hit, while a CRITICAL one stands
    refused       Slurm's time stamp of the drain that stands since our own prolog refused a job; 0 = none does
    unsaved       healthd's last change of the node, until slurmctld has surely saved it: a backup slurmctld that takes
                  over before that does not know of it
    counted       the last complete count of the fleet that can stand in for one that fails (fleet_limit.py)
    uncounted_since  since when a drain is wanted or set and the fleet cannot be counted (0 = it can, or need not be)
    uncounted_at  when the last count failed, 0 = none did since a complete one
    """

    reason: str = ""
    writing: str = ""
    written_at: Moment = 0.0
    overruled: str = ""
    adopted: str = ""
    confirmed_at: Moment = 0.0
    boot_id: str = ""
    rebooting: bool = False
    resumed_at: Moment = 0.0
    requeued: tuple[Requeued, ...] = ()
    hold: FleetHold | None = None
    uncounted: bool = False
    lifted: Lifted | None = None
    stamp: float = 0.0
    earlier: tuple[Lifted, ...] = ()
    drained_at: PastMoment = 0.0
    own_hardware: bool = False
    clean_since: PastMoment = 0.0
    clean_seconds: float = 0.0
    resumed: tuple[Resumed, ...] = ()
    spared: tuple[Spared, ...] = ()
    refused: float = 0.0
    unsaved: Unsaved | None = None
    counted: FleetCount | None = None
    uncounted_since: PastMoment = 0.0
    uncounted_at: PastMoment = 0.0


# --- what a node has, for its baseline


class Baseline(NamedTuple):
    """The settings of a check that `healthd baseline` writes, in their order. `place`: the rank of its table, lowest
    first."""

    settings: tuple[str, ...]
    place: int = 100


class Entry(Value, frozen=True):
    """One setting, or one `key` of a setting that is a table, or one item (the `key`) of a setting that is a list.
    `note`: what it is, for people."""

    check: str
    setting: str
    value: Any = True
    key: str = ""
    instance: str = ""
    note: str = ""


class LeftOut(Value, frozen=True):
    """What a baseline leaves out, and why. `key` "": the whole setting; `setting` "": the whole check. `unread`: it
    could not be looked at, so nobody knows whether it is there; else it was, and looks broken."""

    check: str
    why: str
    setting: str = ""
    key: str = ""
    instance: str = ""
    unread: bool = False

    @property
    def unseen(self) -> bool:
        """A check of which nothing is told was not looked at either."""
        return self.unread or not (self.setting or self.instance)


# --- what the daemon's parts know of themselves


class KernelLogStatus(Value, frozen=True):
    """alive: the source is open and read. lost: lines that were overwritten before they were read; malformed: data that
    was no record, or too long for a line; rotations: how often the file was replaced or cut; observed: the source can
    be forged, so what it says is shown and decides nothing."""

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
    """One thing that healthd listens to: kernel_log, journal (which fills what the ring lost), device_removals.

    up: it is open, and the last read gave no error. last_read: when a read last gave no error, 0 = never yet.
    restarts: how often it was opened again, or this was tried; overruns: how often something was lost.
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
    """How the event stream gets to the disk. waiting: lines that are not on it yet; dropped: lines that did not fit
    beside those; failures: writes that failed; journal_lost: lines that the journal did not take; problem: why none can
    be written, in one sentence."""

    waiting: int = 0
    dropped_total: int = 0
    failures_total: int = 0
    journal_lost_total: int = 0
    problem: str = ""


class SlurmStatus(Value, frozen=True):
    """Slurm's state of the node, as last read. trouble: why it could not be read or changed, in one sentence."""

    node: NodeState | None = None
    owner: str = ""
    read_at: float = 0.0
    problem: str = ""
    commands: dict[tuple[str, str], int] = field(default_factory=dict)  # ("scontrol update", "ok") -> how often


class RoundStatus(Value, frozen=True):
    number: int = 0
    started: float = 0.0
    seconds: float = 0.0
    next_at: float = 0.0
