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
_CHUNK_BYTES = 1 << 16


def write_redacted(source: str, target: str, user_names: Collection[str]) -> tuple[list[str], int]:
    """Write the copy. Return the files that were left out, and the copy's size. Raises archive.ArchiveError or OSError.

    A file of which only the beginning can be read is copied that far, and is also among the files that were left out.
    The copy's text files may contain a name that no rule knows: a person must read it before it is sent.
    """
    original = archive.read_manifest(source)
    document = redact_manifest(original, user_names)
    names = (*user_names, original.node, original.cluster)
    left_out = []
    with tempfile.TemporaryDirectory(prefix="healthd-evidence.", dir=os.path.dirname(target) or ".") as folder:
        files: dict[str, str] = {}
        with archive.open_archive(source) as tar:
            for member in tar:
                name = member.name.partition("/")[2]
                if not member.isfile() or name == manifest.FILE:
                    continue
                content = tar.extractfile(member)
                data, is_whole = _content(name, content.read(MAX_TEXT_BYTES) if content else b"")
                text = redact_file(name, data.decode("utf-8", "replace"), names)
                if text is None or not is_whole or member.size > MAX_TEXT_BYTES:
                    left_out.append(name)
                if text is None:
                    continue
                files[name] = os.path.join(folder, str(len(files)))
                with open(files[name], "wb") as file:
                    redacted = text.encode("utf-8", "replace")
                    file.write(gzip.compress(redacted, mtime=0) if name.endswith(".gz") else redacted)
        size = archive.write_archive(target, document, files)
    return left_out, size


def _content(name: str, data: bytes) -> tuple[bytes, bool]:
    """Return a file's content, and False if a part of it is lost."""
    return gunzip(data, MAX_TEXT_BYTES) if name.endswith(".gz") else (data, True)


def gunzip(data: bytes, limit: int) -> tuple[bytes, bool]:
    """Decompress a gzip file of any number of members, at most `limit` bytes. Return False if a part of it is lost.

    nvidia-bug-report.sh appends one member per section. The last one is cut off if the script was killed.
    """
    found = bytearray()
    inflate = zlib.decompressobj(wbits=31)
    try:
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            while chunk:
                if inflate.eof:
                    inflate = zlib.decompressobj(wbits=31)
                found += inflate.decompress(chunk, limit - len(found) + 1)
                if len(found) > limit:
                    return bytes(found[:limit]), False
                chunk = inflate.unused_data
    except zlib.error:
        return bytes(found), False
    return bytes(found), inflate.eof
