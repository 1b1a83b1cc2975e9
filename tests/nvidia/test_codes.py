from healthd.nvidia import codes


def test_xid_returns_description_and_action_of_nvidia():
    fact = codes.xid(79)
    assert fact is not None
    assert (fact.description, fact.action) == ("GPU has fallen off the bus", "RESTART_BM")
    assert codes.xid(99999) is None


def test_xid_has_every_code_of_the_catalogue():
    assert all(codes.xid(code) is not None for code in range(1, 174))


def test_sxid_returns_name_and_category():
    fact = codes.sxid(20034)
    assert fact is not None
    assert (fact.name, fact.category) == ("LTSSM Fault Up", "potentially fatal")
    assert codes.sxid(1) is None


def test_nvlink5_decodes_unit_and_registers():
    # GB200 logs: RLW_REMAP Fatal (0x00000082 0x00000040), RLW_RXPIPE Nonfatal (0x0409a0c2 0x00000008)
    fatal = codes.nvlink5(145, "RLW_REMAP", 0x82, 0x40)
    assert fatal is not None
    assert (fatal.action, fatal.severity) == ("RESET_GPU", "Fatal")
    harmless = codes.nvlink5(145, "RLW_RXPIPE", 0x0409A0C2, 0x8)
    assert harmless is not None
    assert (harmless.action, harmless.severity) == ("IGNORE", "Non-fatal")


def test_nvlink5_decodes_link_event_by_first_register():
    row = codes.nvlink5(149, "NETIR_LINK_EVT", 0x004525C6, 0)
    assert row is not None
    assert row.action == "RESET_GPU"
    host = codes.nvlink5(149, "NETIR_LINK_EVT", 0x026001C6, 0)
    assert host is not None
    assert host.action == "IGNORE"


def test_nvlink5_uses_worst_of_several_status_bits():
    row = codes.nvlink5(144, "SAW_MVB", 0x21, 0x3)
    assert row is not None
    assert row.action == "RESET_GPU"


def test_nvlink5_reads_both_layouts_of_unit_bits():
    assert codes.nvlink5(145, "RLW_REMAP", 0x82, 0x40) == codes.nvlink5(145, "RLW_REMAP", 0x4, 0x40)


def test_nvlink5_returns_none_for_unlisted_values():
    assert codes.nvlink5(145, "RLW_REMAP", 0x82, 0x1000) is None
    assert codes.nvlink5(145, "NEW_UNIT", 0x82, 0x40) is None
    assert codes.nvlink5(145, "RLW_CTRL", 0x82, 0x40) is None


def test_nvlink4_lists_meanings_worst_first():
    assert [meaning.means for meaning in codes.nvlink4([0x10010, 0, 0, 0x40000])] == [
        "the NVLink fabric must be reset",
        "ECC or parity",
        "perhaps the link's hardware: check its connections",
    ]
    assert codes.nvlink4([]) == codes.nvlink4([0x40800001]) == codes.nvlink4([0, 0xFFFFFFFF]) == ()


def test_each_nvlink4_bit_has_one_meaning():
    bits = [(meaning.word, bit) for meaning in codes.NVLINK4_BITS for bit in meaning.bits]
    assert len(bits) == len(set(bits))


def test_every_nvlink5_row_has_a_sub_code():
    assert {(row.code, row.sub_code) for row in codes.nvlink5_rows()} >= {(144, 0), (149, 4), (149, 38), (150, 0)}
    assert codes.sub_code(0x004525C6) == 4
    assert codes.sub_code(0x026001C6) == 38
    assert all(len({pattern[6:12] for pattern in row.patterns}) == 1 for row in codes.nvlink5_rows())
