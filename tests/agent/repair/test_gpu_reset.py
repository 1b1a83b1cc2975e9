"""Rules of a GPU reset: which GPUs, which services, and what proves the effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.repair.gpu_reset import (
    FABRIC_MANAGER,
    PERSISTENCE_DAEMON,
    GpuReading,
    ResetImpossible,
    ResetPlan,
    command_failure,
    effect_problem,
    is_in_use,
    kernel_clients,
    parse_gpus,
    plan_reset,
    proof,
    services_to_stop,
)
from healthd.agent.repair.journal import Outcome

DATA = Path(__file__).parents[2] / "data"
SERVICES = ("nvidia-persistenced", "nvidia-fabricmanager", "dcgm-exporter.service")
FIRST, SECOND = "0000:1b:00.0", "0000:c1:00.0"


def gpu(pci: str = FIRST, architecture: str = "Hopper", **fields: object) -> GpuReading:
    return replace(GpuReading(f"0000{pci}".upper(), pci, architecture), **fields)


def node(architecture: str = "Hopper", **fields: object) -> tuple[GpuReading, ...]:
    return (gpu(FIRST, architecture, **fields), gpu(SECOND, architecture))


def plan(
    gpus: tuple[GpuReading, ...],
    *parts: str,
    has_nvswitches: bool = False,
    fabric_manager_runs: bool = False,
    inventory: tuple[str, ...] = (FIRST, SECOND),
) -> ResetPlan:
    return plan_reset(gpus, parts, inventory, has_nvswitches, fabric_manager_runs)


def capture(name: str) -> tuple[GpuReading, ...]:
    return parse_gpus((DATA / "nvidia_smi" / f"{name}.xml").read_text())


# --- parser


def test_parse_gpus_reads_capture_of_h100() -> None:
    gpus = capture("h100x8")
    assert len(gpus) == 8
    assert gpus[0] == GpuReading(
        "00000000:53:00.0",
        "0000:53:00.0",
        "Hopper",
        has_persistence=True,
        uncorrectable=0,
    )


@pytest.mark.parametrize(
    ("name", "architecture", "has_mig", "uncorrectable"),
    [
        ("a100", "Ampere", False, 0),
        ("a100-535", "Ampere", True, 0),
        ("p100", "Pascal", False, 0),
        ("t4-515", "Turing", False, 0),
        ("rtx3080", "Ampere", False, None),
        ("b200x8", "Blackwell", False, 0),
    ],
)
def test_parse_gpus_reads_captures(name: str, architecture: str, has_mig: bool, uncorrectable: int | None) -> None:
    first = capture(name)[0]
    assert (first.architecture, first.has_mig, first.uncorrectable) == (architecture, has_mig, uncorrectable)
    assert (first.recovery_action, first.is_pending, first.has_confidential_memory) == ("", False, False)


def test_parse_gpus_reads_signs_of_a_fault() -> None:
    text = """<nvidia_smi_log><gpu id="00000000:1B:00.0"><product_architecture>Hopper</product_architecture>
    <gpu_virtualization_mode><virtualization_mode>Host VGPU</virtualization_mode></gpu_virtualization_mode>
    <gpu_recovery_action>Drain and Reset</gpu_recovery_action>
    <cc_protected_memory_usage><total>81559 MiB</total></cc_protected_memory_usage>
    <ecc_errors><volatile><sram_uncorrectable_parity>2</sram_uncorrectable_parity>
    <dram_uncorrectable>1</dram_uncorrectable></volatile><aggregate><dram_uncorrectable>9</dram_uncorrectable>
    </aggregate></ecc_errors><remapped_rows><remapped_row_pending>Yes</remapped_row_pending></remapped_rows></gpu>"""
    assert parse_gpus(text) == (
        GpuReading(
            "00000000:1B:00.0",
            FIRST,
            "Hopper",
            "Host VGPU",
            has_confidential_memory=True,
            recovery_action="Drain and Reset",
            is_pending=True,
            uncorrectable=3,
        ),
    )


def test_parse_gpus_reads_request_for_reset_of_older_driver() -> None:
    text = '<gpu id="00000000:1B:00.0"><gpu_reset_status><reset_required>Yes</reset_required></gpu_reset_status></gpu>'
    assert parse_gpus(text)[0].recovery_action


@given(st.text(st.sampled_from('<>/= "gpuid0123:.NAYes\n'), max_size=300))
def test_parse_gpus_reads_any_text(text: str) -> None:
    assert isinstance(parse_gpus(text), tuple)


# --- which GPUs


@pytest.mark.parametrize("architecture", ["Ampere", "Ada Lovelace", "Hopper", "Blackwell"])
def test_one_gpu_is_reset_alone(architecture: str) -> None:
    found = plan(node(architecture), FIRST)
    assert (found.ids, found.parts, found.keeps_fabric_manager) == (("00000000:1B:00.0",), (FIRST,), True)
    assert found.argv == ("nvidia-smi", "--gpu-reset", "-i", "00000000:1B:00.0")


@pytest.mark.parametrize("architecture", ["Pascal", "Volta", "Turing"])
def test_gpus_before_ampere_are_reset_together(architecture: str) -> None:
    found = plan(node(architecture), FIRST)
    assert (found.ids, found.parts, found.keeps_fabric_manager) == ((), (FIRST, SECOND), False)
    assert found.argv == ("nvidia-smi", "--gpu-reset")


@pytest.mark.parametrize(
    ("architecture", "fabric_manager_runs", "is_alone"),
    [("Ampere", True, True), ("Ampere", False, False), ("Hopper", False, True), ("Hopper", True, True)],
)
def test_ampere_behind_nvswitches_is_reset_alone_only_with_fabric_manager(
    architecture: str, fabric_manager_runs: bool, is_alone: bool
) -> None:
    found = plan(node(architecture), FIRST, has_nvswitches=True, fabric_manager_runs=fabric_manager_runs)
    assert bool(found.ids) is is_alone
    assert found.parts == ((FIRST,) if is_alone else (FIRST, SECOND))


def test_request_for_all_gpus_resets_nvswitches_too() -> None:
    found = plan(node(), has_nvswitches=True, fabric_manager_runs=True)
    assert (found.ids, found.parts) == ((), (FIRST, SECOND))


@pytest.mark.parametrize("parts", [(SECOND,), ()])
def test_gpu_that_driver_does_not_show_cannot_be_reset(parts: tuple[str, ...]) -> None:
    with pytest.raises(ResetImpossible):
        plan((gpu(),), *parts)


def test_other_lost_gpu_does_not_prevent_reset_of_one_gpu() -> None:
    assert plan((gpu(),), FIRST).parts == (FIRST,)


def test_other_lost_gpu_prevents_reset_of_all_gpus() -> None:
    with pytest.raises(ResetImpossible):
        plan((gpu(architecture="Volta"),), FIRST)


@pytest.mark.parametrize(
    "fields",
    [
        {"architecture": ""},
        {"architecture": "Rubin"},
        {"virtualization": "Host VGPU"},
        {"virtualization": "VGPU"},
        {"has_confidential_memory": True},
        {"rack": "its type is NVIDIA GB200"},
    ],
)
def test_machine_forbids_reset(fields: dict[str, object]) -> None:
    with pytest.raises(ResetImpossible):
        plan(node(**fields) if "architecture" not in fields else (gpu(**fields), gpu(SECOND)), FIRST)


def test_captures_have_the_expected_rules() -> None:
    b200, gb200 = capture("b200x8"), capture("gb200x4")
    assert plan_reset(b200, [b200[3].pci], [], False, True).parts == (b200[3].pci,)
    with pytest.raises(ResetImpossible):
        plan_reset(gb200, [gb200[0].pci], [], False, False)


# Values of the captures: GB200 of an NVL72 rack, and B200, H100 and A100 in one node.
GB200 = {
    "product_name": "NVIDIA GB200",
    "peer_type": "Switch Connected",
    "chassis_serial_number": "1820000000001",
    "slot_number": "14",
    "tray_index": "4",
    "state": "Completed",
    "status": "Success",
    "clusterUuid": "00000001-0000-0000-0000-000000000001",
}
NO_CLUSTER = {"clusterUuid": "00000000-0000-0000-0000-000000000000"}
NO_PLACE = dict.fromkeys(("chassis_serial_number", "slot_number", "tray_index"), "N/A")
B200 = GB200 | NO_PLACE | NO_CLUSTER | {"product_name": "NVIDIA B200", "chassis_serial_number": ""}
H100 = B200 | NO_PLACE | {"product_name": "NVIDIA H100 80GB HBM3", "peer_type": "N/A"}
A100 = H100 | {"product_name": "NVIDIA A100-SXM4-40GB", "state": "N/A", "status": "N/A", "clusterUuid": "N/A"}
FAULTED = {"state": "In Progress", "status": "N/A"}


def fabric_gpu(values: dict[str, str]) -> tuple[GpuReading, ...]:
    """Return the GPU that nvidia-smi shows with these values."""

    def elements(*names: str) -> str:
        return "".join(f"<{name}>{values[name]}</{name}>" for name in names)

    return parse_gpus(
        f"""<gpu id="00000000:1B:00.0">{elements("product_name")}<product_architecture>Hopper</product_architecture>
        <platformInfo>{elements("chassis_serial_number", "slot_number", "tray_index", "peer_type")}</platformInfo>
        <fabric>{elements("state", "status", "clusterUuid")}</fabric></gpu>"""
    )


@pytest.mark.parametrize(
    ("values", "is_reset"),
    [
        (B200, True),  # "Switch Connected" alone is no sign of a rack
        (H100, True),
        (A100, True),
        (H100 | FAULTED, True),  # such as without the fabric manager
        (GB200, False),
        *((GB200 | FAULTED | {"clusterUuid": cluster}, False) for cluster in ("N/A", NO_CLUSTER["clusterUuid"], "")),
        # each sign alone
        (H100 | {"product_name": "NVIDIA GB200"}, False),
        (H100 | {"product_name": "NVIDIA GB300"}, False),
        (H100 | {"clusterUuid": GB200["clusterUuid"]}, False),
        (H100 | {"clusterUuid": "GPU is lost"}, False),
        *((B200 | {name: GB200[name]}, False) for name in NO_PLACE),
        (B200 | FAULTED, False),
        (B200 | {"status": "Unknown Error"}, False),
        (B200 | {"state": "N/A", "status": "N/A", "clusterUuid": "N/A"}, False),
    ],
)
def test_gpu_in_a_fabric_of_several_nodes_is_not_reset(values: dict[str, str], is_reset: bool) -> None:
    gpus = fabric_gpu(values)
    assert bool(gpus[0].rack) is not is_reset
    if is_reset:
        assert plan(gpus, FIRST, inventory=()).parts == (FIRST,)
        return
    for parts in ((FIRST,), (), (SECOND,)):
        with pytest.raises(ResetImpossible):
            plan((*gpus, gpu(SECOND)), *parts)


def test_captured_gpus_of_one_node_are_in_no_rack() -> None:
    for name in ("a100", "h100x8", "b200x8"):
        assert not any(gpu.rack for gpu in capture(name)), name
    assert all(gpu.rack for gpu in capture("gb200x4"))


def test_node_without_gpu_has_nothing_to_reset() -> None:
    with pytest.raises(ResetImpossible):
        plan((), inventory=())


# --- which services


def test_fabric_manager_runs_on_for_one_gpu() -> None:
    assert services_to_stop(plan(node(), FIRST), SERVICES, True) == (
        "nvidia-persistenced.service",
        "dcgm-exporter.service",
    )


@pytest.mark.parametrize("listed", [SERVICES, ("nvidia-persistenced",)])
def test_fabric_manager_stops_for_all_gpus(listed: tuple[str, ...]) -> None:
    assert FABRIC_MANAGER in services_to_stop(plan(node()), listed, True)


@pytest.mark.parametrize(
    ("services", "has_persistence", "ids"),
    [
        ((), True, ("00000000:1B:00.0",)),
        ((PERSISTENCE_DAEMON,), True, ()),
        ((), False, ()),
    ],
)
def test_persistence_mode_without_its_daemon_is_a_client(
    services: tuple[str, ...], has_persistence: bool, ids: tuple[str, ...]
) -> None:
    gpus = (gpu(has_persistence=has_persistence), gpu(SECOND, has_persistence=True))
    assert kernel_clients(plan(gpus, FIRST), gpus, services) == ids


# --- the command's result


def printed(name: str) -> str:
    return re.sub(r"(?m)^# source.*\n", "", (DATA / "repair" / name).read_text())


def test_captured_success_is_a_success() -> None:
    one = plan((gpu("0000:1a:00.0"),), "0000:1a:00.0", inventory=())
    assert command_failure(0, printed("nvidia_smi_reset_done.txt"), one) is None


@pytest.mark.parametrize("name", ["nvidia_smi_reset_in_use_2026.txt", "nvidia_smi_reset_in_use_2020.txt"])
def test_client_of_driver_makes_reset_impossible(name: str) -> None:
    failure = command_failure(255, printed(name), plan(node(), FIRST))
    assert failure is not None
    assert failure[0] is Outcome.IMPOSSIBLE
    assert is_in_use(255, printed(name))


@pytest.mark.parametrize("done", ["GPU 00000000:1B:00.0 was successfully reset.", "successfully reset all GPUs"])
@pytest.mark.parametrize("status", [3, 255])
def test_reset_of_only_some_gpus_has_failed(status: int, done: str) -> None:
    text = f"{done}\nThe following GPUs could not be reset:\n  GPU 00000000:C1:00.0: In use by another client\n"
    failure = command_failure(status, text, plan(node(), FIRST, SECOND))
    assert failure is not None
    assert failure[0] is Outcome.FAILED
    assert not is_in_use(status, text)


@pytest.mark.parametrize(
    ("status", "output", "outcome"),
    [
        (0, "All done.", Outcome.FAILED),  # no GPU is named
        (0, "GPU 00000000:C1:00.0 was successfully reset.", Outcome.FAILED),  # another GPU
        (3, "GPU Reset couldn't run because it's not supported", Outcome.IMPOSSIBLE),
        (15, "GPU is lost", Outcome.FAILED),
        (255, "Unknown Error", Outcome.FAILED),
        (-9, "", Outcome.FAILED),
    ],
)
def test_other_result_of_command(status: int, output: str, outcome: Outcome) -> None:
    failure = command_failure(status, output, plan(node(), FIRST))
    assert failure is not None
    assert failure[0] is outcome


def test_reset_of_all_may_be_reported_in_one_sentence() -> None:
    text = "The operation has successfully reset all GPUs and NVSwitches."
    assert command_failure(0, text, plan(node())) is None
    assert command_failure(0, text, plan(node(), FIRST)) is not None


# --- the effect


FAULTY = node(recovery_action="Reset", is_pending=True, uncorrectable=3)


@pytest.mark.parametrize(
    "after",
    [
        (gpu(SECOND),),  # the GPU is gone
        (gpu(),),  # another GPU is gone
        node(recovery_action="Reset"),
        node(is_pending=True),
        node(uncorrectable=3),
        (),
    ],
)
def test_reset_without_effect_or_with_harm_is_a_problem(after: tuple[GpuReading, ...]) -> None:
    assert effect_problem(FAULTY, after, plan(FAULTY, FIRST))


def test_fault_of_another_gpu_is_no_problem_of_this_reset() -> None:
    after = (gpu(uncorrectable=0), gpu(SECOND, recovery_action="Reset", uncorrectable=1))
    assert effect_problem(FAULTY, after, plan(FAULTY, FIRST)) == ""
    assert proof(FAULTY, plan(FAULTY, FIRST))


def test_lost_mig_mode_is_a_problem() -> None:
    before = node(has_mig=True)
    assert effect_problem(before, node(), plan(before, FIRST))
    assert effect_problem(before, before, plan(before, FIRST)) == ""
