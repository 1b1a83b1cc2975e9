"""What real, healthy machines answered gives nothing above INFO: no check may know hardware only from its manual."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import BOOT, NOW
from smi_capture import CAPTURES, host

from healthd.model import Finding, Severity
from healthd.past import Past
from healthd.registry import built_in

GPU_CHECKS = sorted(name for name, check in built_in().items() if check.uses == "nvml" and check.runs)

# What these machines do have, and what is worth a warning.
TRUE = {
    "gpu_persistence/off": "persistence mode is off on half of them: none of those runs jobs",
}


@pytest.mark.parametrize("check", GPU_CHECKS)
@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.stem)
def test_a_healthy_machine_gives_nothing_above_info(capture: Path, check: str) -> None:
    module = built_in()[check].module
    given = list(module.run(host(capture), module.Config(), Past({}, NOW, BOOT)))
    bad = [item for item in given if isinstance(item, Finding) and item.severity > Severity.INFO]
    assert [finding for finding in bad if finding.code not in TRUE] == []
