"""memory_edac: errors of the host's memory that ECC found."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import codes, observed, refusal, run_check, until_it_fails
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import captured, write

from healthd.checks import memory_edac
from healthd.checks.memory_edac import Config, parse, validate
from healthd.host import Host
from healthd.model import Clears, Finding, Severity
from healthd.past import Past

MC = "/sys/devices/system/edac/mc"
# As the drivers of Intel's servers name them: https://github.com/prometheus/node_exporter/pull/3656
LABEL = "CPU_SrcID#{}_Ha#0_Chan#{}_DIMM#0"
HEALTHY = {
    "power/control": "auto",
    **{
        f"mc{number}/{file}": text
        for number in range(2)
        for file, text in {
            "mc_name": f"Skylake Socket#{number} IMC#0",
            "ue_count": "0",
            "ce_count": "0",
            "ue_noinfo_count": "0",
            "ce_noinfo_count": "0",
            **{
                f"dimm{channel}/{name}": text
                for channel in (0, 2)
                for name, text in {
                    "dimm_ce_count": "0",
                    "dimm_ue_count": "0",
                    "dimm_label": LABEL.format(number, channel),
                }.items()
            },
        }.items()
    },
}
ABSENT_IS_FINE = {
    MC: "no EDAC driver: virtual machines, and boards whose firmware keeps the errors to itself",
    rf"{MC}/mc\d+": "a memory controller without DIMMs is one without counts of DIMMs",
}


@pytest.fixture
def node(tmp_path):
    """Makes a node of two controllers with two DIMMs each; node({"mc0/ue_count": "1"}) changes files."""

    def make(changed=()):
        return write(tmp_path, {f"{MC}/{file}": f"{text}\n" for file, text in {**HEALTHY, **dict(changed)}.items()})

    return make


def healthy(tmp_path: Path) -> tuple[Host, Config]:
    return write(tmp_path, {f"{MC}/{file}": f"{text}\n" for file, text in HEALTHY.items()}), Config()


def found(story: Story) -> list[Finding]:
    assert story.result is not None
    return list(story.result.findings)


# what is read


def test_a_healthy_node_gives_its_counters_and_no_finding(node):
    given_ = run_check(memory_edac, node())
    assert not [item for item in given_ if isinstance(item, Finding)]
    assert len(list(observed(given_, "memory_edac_uncorrected_errors_total"))) == 2
    assert [dict(item.labels)["part"] for item in observed(given_, "memory_edac_corrected_errors_total")] == [
        *("mc0", "mc0/dimm0", "mc0/dimm2", "mc1", "mc1/dimm0", "mc1/dimm2")
    ]


def test_a_machine_without_edac_gives_nothing(tmp_path):
    assert run_check(memory_edac, Host(str(tmp_path))) == []


def test_ranks_are_read_like_dimms(tmp_path):
    files = dict(line.rsplit(":", 1) for line in captured("edac_ranks.txt").splitlines())
    files |= {f"{MC}/mc{number}/{file}": "0" for number in (0, 1) for file in ("ue_count", "ce_noinfo_count")}
    given_ = run_check(memory_edac, write(tmp_path, files))
    assert {dict(i.labels)["part"]: i.value for i in given_ if i.value} == {"mc0/rank4": 1}


def test_an_old_kernel_counts_by_rows(tmp_path):
    lines = captured("edac_csrow.txt").splitlines()
    files = {**dict(zip(lines[::2], lines[1::2], strict=True)), f"{MC}/mc0/ce_noinfo_count": "0"}
    given_ = run_check(memory_edac, write(tmp_path, files))
    assert [dict(item.labels)["part"] for item in given_] == ["mc0", "mc0", "mc0/csrow0"]


def test_a_kernel_that_has_both_is_not_counted_twice(node):
    given_ = run_check(memory_edac, node({"mc0/csrow0/ce_count": "5"}))
    assert "mc0/csrow0" not in {dict(item.labels)["part"] for item in given_}


# what was there before is no news


def test_counts_that_were_there_before_the_first_look_are_no_finding(node):
    given_ = run_check(memory_edac, node({"mc0/ue_count": "3", "mc0/dimm0/dimm_ce_count": "50000"}))
    assert not [item for item in given_ if isinstance(item, Finding)]


# uncorrected errors


def test_an_uncorrected_error_drains_and_requeues_until_a_reboot(node):
    story = Story(memory_edac).look(node())
    bad = node({"mc1/ue_count": "1", "mc1/dimm2/dimm_ue_count": "1"})
    story.look(bad)
    (finding,) = found(story)
    assert (finding.code, finding.subject, finding.severity) == ("memory_edac/uncorrected", "mc1", Severity.CRITICAL)
    assert finding.message == f"1 new uncorrected memory errors (since boot: {LABEL.format(1, 2)} (mc1/dimm2) 1)"
    assert story.drained
    assert story.requeued
    story.looks(bad, 400)  # a day without load and without news
    assert story.drained
    story.reboot().looks(node({"mc1/ue_count": "0", "mc1/dimm2/dimm_ue_count": "0"}), 2)
    assert not story.drained
    assert not story.codes


def test_uncorrected_errors_again_after_the_reboot_wait_for_an_operator(node):
    story = Story(memory_edac).look(node()).look(node({"mc0/ue_count": "1"}))
    story.reboot().looks(node({"mc0/ue_count": "0"}), 2)
    assert not story.drained
    story.look(node({"mc0/ue_count": "1"})).reboot().looks(node({"mc0/ue_count": "0"}), 400)
    assert story.drained
    story.repaired("memory_edac/uncorrected", "mc0").look(node())
    assert not story.drained


def test_an_uncorrected_error_that_no_dimm_is_named_for_counts_too(node):
    story = Story(memory_edac).look(node()).look(node({"mc0/ue_count": "2", "mc0/ue_noinfo_count": "2"}))
    (finding,) = found(story)
    assert finding.message == "2 new uncorrected memory errors"
    assert story.drained


def test_an_error_of_a_named_dimm_is_one_finding(node):
    """The controller's count has it, and the DIMM's."""
    story = Story(memory_edac).look(node()).look(node({"mc0/ue_count": "1", "mc0/dimm0/dimm_ue_count": "1"}))
    assert codes(found(story)) == ["memory_edac/uncorrected"]


def test_names_that_cannot_be_read_hide_no_error(node, tmp_path):
    story = Story(memory_edac).look(node())
    host = node({"mc0/ue_count": "1"})
    for name in ("dimm_ue_count", "dimm_label"):
        file = tmp_path / f"{MC}/mc0/dimm0/{name}"[1:]
        file.unlink()
        file.mkdir()  # reading it gives EISDIR
    assert codes(found(story.look(host))) == ["memory_edac/uncorrected"]


def test_a_garbled_file_hides_no_error_elsewhere(node):
    before = Story(memory_edac).look(node())
    past = Past(before.past, before.now + 300, before.boot_id)
    given_ = memory_edac.run(node({"mc0/ue_count": "N/A", "mc1/ue_count": "1"}), Config(), past)
    found_ = []
    with pytest.raises(ValueError, match="mc0/ue_count: not a count: 'N/A'"):
        found_.extend(item.subject for item in given_ if isinstance(item, Finding))
    assert found_ == ["mc1"]


def test_one_that_was_counted_between_the_boot_and_the_first_look_warns_until_the_next_boot(node):
    story = Story(memory_edac).look(node())
    bad = node({"mc0/ue_count": "1"})
    story.reboot().look(bad)
    assert (story.codes, story.drained) == (["memory_edac/uncorrected_at_boot"], False)
    assert story.looks(bad, 400).codes == ["memory_edac/uncorrected_at_boot"]
    assert story.look(node({"mc0/ue_count": "2"})).drained
    story.reboot().looks(node(), 2)
    assert (story.codes, story.drained) == ([], False)


# corrected errors


def corrected(node, count, file="mc0/dimm2/dimm_ce_count"):
    return node({file: str(count)})


def test_many_corrected_errors_in_a_day_warn_and_never_drain(node):
    story = Story(memory_edac).look(node()).look(corrected(node, 1000))
    assert story.codes == []
    story.look(corrected(node, 1001))
    assert story.codes == ["memory_edac/corrected"]
    (finding,) = found(story)
    assert (finding.severity, finding.clears, finding.subject) == (Severity.WARNING, Clears.REBOOT, "mc0/dimm2")
    assert LABEL.format(0, 2) in finding.message
    assert not story.drained


def test_the_warning_ends_after_a_clean_day(node):
    story = Story(memory_edac).look(node()).look(corrected(node, 5000))
    still = corrected(node, 5000)
    story.looks(still, 12, minutes=110)  # 22 h
    assert story.codes == ["memory_edac/corrected"]
    story.looks(still, 3, minutes=110)
    assert story.codes == []


def test_the_warning_does_not_end_while_errors_go_on(node):
    story = Story(memory_edac).look(node())
    for hour in range(60):
        story.look(corrected(node, 100 * hour), minutes=60)
    assert story.codes == ["memory_edac/corrected"]


def test_the_warning_ends_with_a_reboot_and_yesterdays_errors_do_not_count_after_it(node):
    story = Story(memory_edac).look(node()).look(corrected(node, 5000))
    story.reboot().looks(corrected(node, 0), 2).look(corrected(node, 3))
    assert story.codes == []


def test_few_corrected_errors_every_day_are_no_finding(node):
    story = Story(memory_edac).look(node())
    for hour in range(60):
        story.look(corrected(node, 40 * hour), minutes=60)
        assert story.codes == []


def test_corrected_errors_that_no_dimm_is_named_for_warn_too(node):
    story = Story(memory_edac).look(node()).look(corrected(node, 2000, "mc1/ce_noinfo_count"))
    assert [finding.subject for finding in found(story)] == ["mc1"]


def test_the_limit_is_a_setting(node):
    story = Story(memory_edac, Config(corrected_per_day=5)).look(node()).look(corrected(node, 6))
    assert story.codes == ["memory_edac/corrected"]


def test_a_negative_limit_is_refused():
    assert "must not be negative" in (validate(Config(corrected_per_day=-1)) or "")
    assert validate(Config()) is None


# garbage


def test_a_file_that_vanishes_is_unknown(node, tmp_path):
    host = node()
    (tmp_path / f"{MC}/mc0/dimm0/dimm_ce_count"[1:]).unlink()
    assert until_it_fails(memory_edac, host)[1] == f"{MC}/mc0/dimm0/dimm_ce_count: is not there"


@given(st.one_of(st.text(max_size=12), st.sampled_from(["", "N/A", "-1", "1.0", "٣", "0x1", str(2**32), str(2**64)])))
def test_what_is_no_count_is_refused_in_one_sentence(text):
    count, said = refusal(parse, text, "mc0/ue_count")
    if said:
        assert said.startswith(f"{MC}/mc0/ue_count: not a count")
    else:
        assert str(count) == text.lstrip("0") or count == 0
