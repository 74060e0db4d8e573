"""Messages between processes of one host: through shared memory, announced over a socket.

One hop over a boundary, from the rank that computed a tensor to the rank that needs it::

    rank 0                                 socket                                  rank 1
    ------                                 ------                                  ------
    send_parts(layout, control, tensors)                                           receive_parts(layout) posts a receive
    (1) no free buffer of this size:
        make memory, map it -------------> MEMORY, number, size, descriptor ->     (2) maps the same memory
    (3) layout.write copies into it
              +----------------------------- buffer 5 -----------------------------+
              | control words | tensor | tensor | ...            (unused to 2^n)   |
              +--------------------------------------------------------------------+
    (4) announces it --------------------> MESSAGE, tag, buffer 5, size ----->     (5) reads packets while it waits
                                                                                   (6) copies the message out of it
        buffer 5 is free again <---------- a next MESSAGE, or FREE, with [5, ...]  (7) notes that it has read it

(1) A buffer belongs to the process that made it, which alone writes to it and alone gives it to a message. Buffers are
made in files of up to 256, and none is ever given back to the system before the connection ends: a step needs the same
ones again. (2) Both ends close the descriptor once they have mapped the memory. (3) After the copy the sender may
change its tensors, so a send is done when it returns. (4) The socket holds hundreds of packets; while it is full the
sender waits, and reads. (5) The packet may belong to another lane: it waits there for its receive. (6) The receiver's
tensors lie in memory of its own, so nothing the user does with them keeps the buffer. (7) Numbers of buffers that were
read travel with the next message the other way, or alone when there are 16 of them or 256 KiB: a lane may have no
traffic the other way.

A process that ends closes its socket. The other end still reads what was announced before, then its `wait` raises.

`rendezvous` connects the processes, `peer` is one connection. The messages of an object take the same way.
"""
