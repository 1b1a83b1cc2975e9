"""hangfs.py MOUNTPOINT [ERRNO]: a FUSE mount that answers INIT and nothing else, or this error to all that is asked.
It ends at the end of its input."""

import ctypes
import os
import select
import struct
import sys

STDIN, FUSE_INIT, MNT_DETACH = 0, 26, 2
UNANSWERED = (2, 36, 42)  # FUSE_FORGET, FUSE_INTERRUPT, FUSE_BATCH_FORGET
HEADER, REPLY = struct.Struct("<IIQ"), struct.Struct("<IiQ")  # length, opcode or error, unique
INIT_REPLY = struct.Struct("<IIIIHHIIHHI7I")  # fuse_init_out of the kernel's include/uapi/linux/fuse.h

mountpoint, error = sys.argv[1].encode(), int(sys.argv[2]) if len(sys.argv) > 2 else 0
libc = ctypes.CDLL(None, use_errno=True)
fuse = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
if libc.mount(b"hangfs", mountpoint, b"fuse.hangfs", 0, options):
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
_, opcode, unique = HEADER.unpack_from(os.read(fuse, 1 << 20))
assert opcode == FUSE_INIT
reply = INIT_REPLY.pack(7, 31, 0, 0, 16, 12, 4096, 1, 0, 0, 0, *[0] * 7)
os.write(fuse, REPLY.pack(REPLY.size + len(reply), 0, unique) + reply)
print("ready", flush=True)
while STDIN not in select.select([fuse, STDIN], [], [])[0]:
    _, opcode, unique = HEADER.unpack_from(os.read(fuse, 1 << 20))
    if error and opcode not in UNANSWERED:
        os.write(fuse, REPLY.pack(REPLY.size, -error, unique))
os.close(fuse)  # whoever waits gets an error now
libc.umount2(mountpoint, MNT_DETACH)
