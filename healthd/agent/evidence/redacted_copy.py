"""Write the redacted copy of an archive, for a vendor."""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from collections.abc import Collection

from healthd.agent.evidence import archive, manifest
from healthd.agent.evidence.redact import redact_file, redact_manifest

MAX_TEXT_BYTES = 256 << 20  # of one file


def write_redacted(source: str, target: str, user_names: Collection[str]) -> tuple[list[str], int]:
    """Write the copy. Return the files that were left out, and the copy's size. Raises archive.ArchiveError or OSError.

    The copy's text files may contain a name that no rule knows: a person must read it before it is sent.
    """
    document = redact_manifest(archive.read_manifest(source))
    left_out = []
    with tempfile.TemporaryDirectory(prefix="healthd-evidence.", dir=os.path.dirname(target) or ".") as folder:
        files: dict[str, str] = {}
        with archive.open_archive(source) as tar:
            for member in tar:
                name = member.name.partition("/")[2]
                if not member.isfile() or name == manifest.FILE:
                    continue
                content = tar.extractfile(member)
                text = redact_file(name, _text(name, content.read(MAX_TEXT_BYTES) if content else b""), user_names)
                if text is None:
                    left_out.append(name)
                    continue
                files[name] = os.path.join(folder, str(len(files)))
                with open(files[name], "wb") as file:
                    data = text.encode("utf-8", "replace")
                    file.write(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
        size = archive.write_archive(target, document, files)
    return left_out, size


def _text(name: str, data: bytes) -> str:
    """Return a file's text. A gzip file may be truncated: its program was killed."""
    if name.endswith(".gz"):
        inflate = zlib.decompressobj(wbits=31)
        try:
            data = inflate.decompress(data, MAX_TEXT_BYTES)
        except zlib.error:
            data = b""
    return data.decode("utf-8", "replace")
