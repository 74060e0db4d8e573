"""One rank failing ends all of them, and the reason reaches the user.

How an error on rank 2 of four reaches everybody::

    rank 2, main thread        store (served by process 0)       the other ranks
    -------------------        ---------------------------       ---------------
    a layer raises
    board.fail(error) ------>  "failure": the traceback     (A)
      transport.abort() - - - - - - - connections close - - - >  rank 1 is blocked on rank 2: its operation fails  (B)
                               "failure" <---------------------    Transport.error asks board.explain
                                                                   raises CommunicationError with the traceback
                               "failure" <---------------------  rank 0 computes: its watchdog looks once a second  (C)
                                                                   the next `board.position = ...` raises, or
                                                                   after `patience` it aborts the transport: as (B)
                                                                   after `exit_after` it ends the process

(A) The first entry stays: a consequence of the failure does not replace it. (B) A neighbour of rank 2 notices at once.
A rank without a connection to rank 2 notices when one of its own neighbours aborts. (C) While the main thread is in a
layer, or in a collective that nobody else will join, only a thread can act. The store ends with process 0, which
therefore waits a moment before it ends. Each process prints its own error.

Nobody raises in three other cases, and each becomes an entry or an error like the one above:

* *A hang*: an operation takes longer than the timeout. The watchdog enters where its process stands and since when as
  the failure; every other watchdog prints where its own process stands, and (B) and (C) follow.
* *A killed process*: its neighbours see their connections close, wait `patience` for an entry, and say that nobody has
  said why. The process that has started it says how it has ended.
* *Process 0 itself*, and the store with it: nothing can be entered any more; each of the others ends with
  what it knows.
"""
