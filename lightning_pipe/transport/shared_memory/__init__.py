"""Messages between processes of one host: through shared memory, announced over a socket.

One hop over a boundary, from the rank that computed a tensor to the rank that needs it::

    rank 0                                 socket                                  rank 1
    ------                                 ------                                  ------
    send_parts(layout, control, tensors)                                           receive_parts(layout) posts a receive
    (1) no buffer of this size is unmarked:
        make memory, map it -------------> MEMORY, number, size, descriptor ->     (2) maps the same memory
    (3) layout.write copies into it, its mark is set to 1
              +----------------------------- buffer 5 -----------------------------+
              | control words | tensor | tensor | ...            (unused to 2^n)   |
              +--------------------------------------------------------------------+
    (4) announces it --------------------> MESSAGE, tag, buffer 5, size ----->     (5) reads packets while it waits
                                                                                   (6) copies the message out of it
    (7) the buffer's mark is 0 again                                               (7) sets the mark of buffer 5 to 0

(1) A buffer belongs to the process that made it, which alone writes to it and alone gives it to a message. Buffers are
made in files of up to 256, and none is ever given back to the system before the connection ends: a step needs the same
ones again. (2) Both ends close the descriptor once they have mapped the memory. (3) After the copy the sender may
change its tensors, so a send is done when it returns. (4) The socket holds hundreds of packets; while it is full the
sender waits, and reads. (5) The packet may belong to another lane: it waits there for its receive. (6) The receiver's
tensors lie in memory of its own, so nothing the user does with them keeps the buffer. (7) Marks lie in shared memory as
well, so that nothing travels back.

A process that ends closes its socket. The other end still reads what was announced before, then its `wait` raises.

`rendezvous` connects the processes, `peer` is one connection. The messages of an object take the same way.
"""
