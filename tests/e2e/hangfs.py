"""hangfs.py MOUNTPOINT [ERRNO [UID]]: a FUSE mount of this user that answers INIT and nothing else, or this error to
all that is asked. It says "ready", then the pid of each process whose question it has read. It ends at the end of its
input."""

import contextlib
import ctypes
import os
import select
import struct
import sys

STDIN, FUSE_INIT, MNT_DETACH = 0, 26, 2
UNANSWERED = (2, 36, 42)  # FUSE_FORGET, FUSE_INTERRUPT, FUSE_BATCH_FORGET
HEADER = struct.Struct("<IIQQIII")  # length, opcode, unique, node, uid, gid, pid
REPLY = struct.Struct("<IiQ")  # length, error, unique
INIT_REPLY = struct.Struct("<IIIIHHIIHHI7I")  # fuse_init_out of the kernel's include/uapi/linux/fuse.h

mountpoint, error = sys.argv[1].encode(), int(sys.argv[2]) if len(sys.argv) > 2 else 0
libc = ctypes.CDLL(None, use_errno=True)
fuse = os.open("/dev/fuse", os.O_RDWR)
user = int(sys.argv[3]) if len(sys.argv) > 3 else 0
options = f"fd={fuse},rootmode=40000,user_id={user},group_id={user},allow_other".encode()
if libc.mount(b"hangfs", mountpoint, b"fuse.hangfs", 0, options):
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
_, opcode, unique, *_ = HEADER.unpack_from(os.read(fuse, 1 << 20))
assert opcode == FUSE_INIT
reply = INIT_REPLY.pack(7, 31, 0, 0, 16, 12, 4096, 1, 0, 0, 0, *[0] * 7)
os.write(fuse, REPLY.pack(REPLY.size + len(reply), 0, unique) + reply)
print("ready", flush=True)
os.set_blocking(fuse, False)  # a question is gone again where its process was killed before it was read
os.set_blocking(sys.stdout.fileno(), False)
while STDIN not in select.select([fuse, STDIN], [], [])[0]:
    try:
        _, opcode, unique, _, _, _, pid = HEADER.unpack_from(os.read(fuse, 1 << 20))
    except BlockingIOError:
        continue
    with contextlib.suppress(BlockingIOError):  # nobody reads so many lines
        os.write(sys.stdout.fileno(), b"%d\n" % pid)
    if error and opcode not in UNANSWERED:
        os.write(fuse, REPLY.pack(REPLY.size, -error, unique))
os.close(fuse)  # whoever waits gets an error now
libc.umount2(mountpoint, MNT_DETACH)
