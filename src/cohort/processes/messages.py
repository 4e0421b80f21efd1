"""The form of messages between a process and its child: a `HEADER` with the content's length, then the content."""

import struct

HEADER = struct.Struct("!Q")
MAX_MESSAGE_BYTES = 64 << 20  # of the child
CLOSE_TIMEOUT_S = 5.0  # for the child to close what it holds
