from healthd import codes


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
