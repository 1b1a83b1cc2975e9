"""hangfs.py MOUNTPOINT [ERRNO [UID [opens]]]: a FUSE mount of this user that answers only INIT, or all with an error.

With "opens", any name except "lost" exists and can be opened, and a name that ends in "d" is a directory. Other
requests get no answer. It prints "ready", then the pid of each process whose request it has read and not answered. It
ends at the end of its input.
"""

import contextlib
import ctypes
import os
import select
import struct
import sys

STDIN, FUSE_INIT, MNT_DETACH = 0, 26, 2
UNANSWERED = (2, 36, 42)  # FUSE_FORGET, FUSE_INTERRUPT, FUSE_BATCH_FORGET
LOOKUP, GETATTR, OPEN, OPENDIR, ACCESS = 1, 3, 14, 27, 34
LOCKS_AND_PARALLEL_DIROPS = 1 << 1 | 1 << 18
HEADER = struct.Struct("<IIQQIII4x")  # length, opcode, unique, node, uid, gid, pid
REPLY = struct.Struct("<IiQ")  # length, error, unique
INIT_REPLY = struct.Struct("<IIIIHHIIHHI7I")  # fuse_init_out of the kernel's include/uapi/linux/fuse.h
ATTRIBUTES = struct.Struct("<6Q10I")  # fuse_attr

mountpoint, error = sys.argv[1].encode(), int(sys.argv[2]) if len(sys.argv) > 2 else 0
opens = "opens" in sys.argv[4:]
nodes = {(0, b"d"): 1}  # number of the parent and name -> number


def attributes(node):
    mode = next(0o40777 if name.endswith(b"d") else 0o100777 for (_, name), known in nodes.items() if known == node)
    return ATTRIBUTES.pack(node, 1 << 20, 2048, *[0] * 6, mode, 1, user, user, 0, 4096, 0)


def answer(opcode, node, name):
    """Return the answer to a request that is part of opening a file, or None for any other request."""
    if opcode == LOOKUP and name != b"lost":
        found = nodes.setdefault((node, name), len(nodes) + 1)
        return struct.pack("<5Q", found, *[0] * 4) + attributes(found)
    if opcode == GETATTR:
        return bytes(16) + attributes(node)
    return {OPEN: bytes(16), OPENDIR: bytes(16), ACCESS: b""}.get(opcode)


libc = ctypes.CDLL(None, use_errno=True)
fuse = os.open("/dev/fuse", os.O_RDWR)
user = int(sys.argv[3]) if len(sys.argv) > 3 else 0
options = f"fd={fuse},rootmode=40000,user_id={user},group_id={user},allow_other".encode()
if libc.mount(b"hangfs", mountpoint, b"fuse.hangfs", 0, options):
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
_, opcode, unique, *_ = HEADER.unpack_from(os.read(fuse, 1 << 20))
assert opcode == FUSE_INIT
reply = INIT_REPLY.pack(7, 31, 0, LOCKS_AND_PARALLEL_DIROPS if opens else 0, 16, 12, 4096, 1, 0, 0, 0, *[0] * 7)
os.write(fuse, REPLY.pack(REPLY.size + len(reply), 0, unique) + reply)
print("ready", flush=True)
os.set_blocking(fuse, False)  # a request disappears if its process is killed before it is read
os.set_blocking(sys.stdout.fileno(), False)
while STDIN not in select.select([fuse, STDIN], [], [])[0]:
    try:
        asked = os.read(fuse, 1 << 20)
    except BlockingIOError:
        continue
    _, opcode, unique, node, _, _, pid = HEADER.unpack_from(asked)
    name = asked[HEADER.size :].partition(b"\0")[0]
    if opens and (told := answer(opcode, node, name)) is not None:
        os.write(fuse, REPLY.pack(REPLY.size + len(told), 0, unique) + told)
        continue
    with contextlib.suppress(BlockingIOError):  # the pipe may be full
        os.write(sys.stdout.fileno(), b"%d\n" % pid)
    if error and opcode not in UNANSWERED:
        os.write(fuse, REPLY.pack(REPLY.size, -error, unique))
os.close(fuse)  # waiting processes get an error now
libc.umount2(mountpoint, MNT_DETACH)
