"""perftest (github.com/linux-rdma/perftest): runs ib_write_bw from a port to itself, through the card and over PCIe.

A server and a client on this machine connect over TCP at 127.0.0.1. The heading names the table's unit: "BW
average[Gb/sec]" with --report_gbits, "BW average[MB/sec]" without it (2^20 bytes). The average is used. The peak is not
used, because it is 0.00 if it was not measured.
"""

from __future__ import annotations

from healthd.common.text import printable, regex
from healthd.validation.measurement import Measurement, NotUnderstood

MESSAGE_BYTES = 8 << 20  # as in AzNHC's azure_ib_write_bw_gdr.nhc
_HEADING = regex(r"#bytes\s+#iterations\s+BW peak\[(Gb|MB|MiB)/sec\]\s+BW average\[(?:Gb|MB|MiB)/sec\]")
_ROW = regex(
    r"\s*([0-9]{1,12})\s+[0-9]{1,12}\s+(?:-?nan|[0-9]{1,9}\.[0-9]{1,6})\s+([0-9]{1,9}\.[0-9]{1,6})\s+[0-9.]{1,16}\s*"
)
# "Couldn't connect to ...", "Unable to init the socket connection", "Completion with error at client", "Failed
# status 12:"
_PROBLEM = regex(
    r"[^\n]{0,80}(?:Couldn't|Unable to|Completion with error|Failed status|Failed to|No such device|not found)"
    r"[^\n]{0,160}"
)
# Messages from a server that cannot listen: its own, and bind(2)'s.
PORT_IS_TAKEN = regex(r"Couldn't listen to port|Unable to open file descriptor for socket|Address already in use")
_LINK_ERROR = regex(r"Completion with error|Failed status")
TO_GBITS = {"Gb": 1.0, "MB": 8 * 2**20 / 1e9, "MiB": 8 * 2**20 / 1e9}


def commands(program: str, port: str, tcp_port: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the commands for the server and for the client. The client is started when `tcp_port` is open.

    Args:
        port: "mlx5_0/1".
    """
    device, _, number = port.partition("/")
    common = (program, "-d", device, "-i", number, "-p", str(tcp_port), "-s", str(MESSAGE_BYTES), "-n", "500", "-F")
    server = (*common, "--report_gbits")
    return server, (*server, "127.0.0.1")


def parse(text: str, port: str) -> list[Measurement]:
    """Parse the client's output. The result is the average for the largest message, in Gb/s. Raises NotUnderstood."""
    heading, best = None, None
    for line in text.splitlines():
        heading = _HEADING.search(line) or heading
        row = _ROW.fullmatch(line) if heading else None
        if heading and row:
            best = max(best or (0, 0.0), (int(row[1]), float(row[2]) * TO_GBITS[heading[1]]))
    if best is not None and best[1] > 0:
        return [Measurement("ib_loopback", port, best[1], "Gb/s", "measured", "", "perftest")]
    if problem := _PROBLEM.search(text):
        message = printable(" ".join(problem[0].split()))[:300]
        state = "failed" if _LINK_ERROR.search(text) else "not_measured"
        return [Measurement("ib_loopback", port, None, "Gb/s", state, message, "perftest")]
    raise NotUnderstood("this is not output from ib_write_bw")
