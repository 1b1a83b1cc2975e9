from healthd.nvidia import codes


def test_an_xid_is_known_with_nvidias_action():
    fact = codes.xid(79)
    assert fact is not None
    assert (fact.description, fact.action) == ("GPU has fallen off the bus", "RESTART_BM")
    assert codes.xid(99999) is None


def test_every_code_of_the_catalogue_is_there():
    assert all(codes.xid(code) is not None for code in range(1, 174))


def test_an_sxid_is_known_with_its_category():
    fact = codes.sxid(20034)
    assert fact is not None
    assert (fact.name, fact.category) == ("LTSSM Fault Up", "potentially fatal")
    assert codes.sxid(1) is None


def test_an_nvlink_error_is_decoded_by_unit_and_registers():
    # GB200 logs: RLW_REMAP Fatal (0x00000082 0x00000040), RLW_RXPIPE Nonfatal (0x0409a0c2 0x00000008)
    fatal = codes.nvlink5(145, "RLW_REMAP", 0x82, 0x40)
    assert fatal is not None
    assert (fatal.action, fatal.severity) == ("RESET_GPU", "Fatal")
    harmless = codes.nvlink5(145, "RLW_RXPIPE", 0x0409A0C2, 0x8)
    assert harmless is not None
    assert (harmless.action, harmless.severity) == ("IGNORE", "Non-fatal")


def test_a_link_event_is_decoded_by_its_first_register_alone():
    row = codes.nvlink5(149, "NETIR_LINK_EVT", 0x004525C6, 0)
    assert row is not None
    assert row.action == "RESET_GPU"
    host = codes.nvlink5(149, "NETIR_LINK_EVT", 0x026001C6, 0)
    assert host is not None
    assert host.action == "IGNORE"


def test_several_status_bits_are_as_bad_as_the_worst():
    row = codes.nvlink5(144, "SAW_MVB", 0x21, 0x3)
    assert row is not None
    assert row.action == "RESET_GPU"


def test_both_layouts_of_the_unit_bits_are_read():
    assert codes.nvlink5(145, "RLW_REMAP", 0x82, 0x40) == codes.nvlink5(145, "RLW_REMAP", 0x4, 0x40)


def test_what_the_table_does_not_hold_is_unknown():
    assert codes.nvlink5(145, "RLW_REMAP", 0x82, 0x1000) is None
    assert codes.nvlink5(145, "NEW_UNIT", 0x82, 0x40) is None
    assert codes.nvlink5(145, "RLW_CTRL", 0x82, 0x40) is None


def test_the_registers_of_an_xid_74_are_read_worst_first():
    assert [known.means for known in codes.nvlink4([0x10010, 0, 0, 0x40000])] == [
        "the NVLink fabric must be reset",
        "ECC or parity",
        "perhaps the link's hardware: check its connections",
    ]
    assert codes.nvlink4([]) == codes.nvlink4([0x40800001]) == codes.nvlink4([0, 0xFFFFFFFF]) == ()


def test_each_bit_of_a_register_means_one_thing():
    bits = [(known.word, bit) for known in codes.NVLINK4_BITS for bit in known.bits]
    assert len(bits) == len(set(bits))


def test_every_row_of_the_nvlink5_table_has_a_sub_code():
    assert {(row.code, row.sub_code) for row in codes.nvlink5_rows()} >= {(144, 0), (149, 4), (149, 38), (150, 0)}
    assert codes.sub_code(0x004525C6) == 4
    assert codes.sub_code(0x026001C6) == 38
    assert all(len({pattern[6:12] for pattern in row.patterns}) == 1 for row in codes.nvlink5_rows())
