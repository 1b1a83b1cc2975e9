"""The GPUs in each node's slots, and their replacement in long repairs. A removed GPU may be reused in another node."""

from __future__ import annotations

from zlib import crc32

from history.draw import between, stream
from history.size import Size, node_name
from history.truth import Truth

SLOTS = tuple(f"0000:{bus:02x}:00.0" for bus in (0x07, 0x0F, 0x47, 0x4E, 0x87, 0x90, 0xB7, 0xBD))
NAME = "NVIDIA H100 80GB HBM3"
FIRST_SERIAL = 1_650_522_000_000
REPLACED, REUSED = 0.8, 0.4  # share of the long repairs of a GPU that replace it; share of the GPUs that are reused


class Hardware:
    """The serial number of the GPU in each node and slot. `replacements`: number of GPUs that were replaced."""

    def __init__(self, size: Size, truth: Truth) -> None:
        self._truth, self._draw = truth, stream(size.seed, "gpus")
        self._next = FIRST_SERIAL
        self.replacements = 0
        self._spares: list[str] = []
        self._gpus = [{slot: (self._new_serial(), size.start) for slot in SLOTS} for _ in range(size.nodes)]

    def _new_serial(self) -> str:
        self._next += 1
        return str(self._next)

    def serial(self, node: int, subject: str) -> str:
        """Return the serial number of the GPU in this slot, or "" for another part."""
        return self._gpus[node].get(subject, ("", 0))[0]

    def listed(self, node: int) -> tuple[dict[str, str], ...]:
        """Return the node's GPUs as the event `gpus` lists them."""
        return tuple(
            {"subject": slot, "serial": serial, "uuid": uuid(serial), "name": NAME}
            for slot, (serial, _) in self._gpus[node].items()
        )

    def repair(self, now: int, about: tuple[int, list[tuple[str, str]]]) -> None:
        """Repair a node that is shut down. The GPU that one of the faults names may be replaced."""
        node, faults = about
        slot = next((subject for _, subject in faults if subject in SLOTS), None)
        if slot is None or self._draw() >= REPLACED:
            return
        self.replacements += 1
        serial, since = self._gpus[node][slot]
        spare = bool(self._spares)
        following = self._spares.pop(between(self._draw, 0, len(self._spares))) if spare else self._new_serial()
        self._truth.row("gpus", node_name(node), slot, serial, since, now)
        self._gpus[node][slot] = following, now
        if self._draw() < REUSED:
            self._spares.append(serial)

    def end(self) -> None:
        """Write the GPUs that are in the nodes at the end of the history to the truth."""
        for node, gpus in enumerate(self._gpus):
            for slot, (serial, since) in gpus.items():
                self._truth.row("gpus", node_name(node), slot, serial, since, None)


def uuid(serial: str) -> str:
    return f"GPU-{crc32(serial.encode()):08x}-0000-4000-8000-{int(serial):012x}"
