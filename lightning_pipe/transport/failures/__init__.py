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
                               "readers": all have read it       process 0 waits for that before it ends  (D)
                               "reporter": the first to enter    one process prints the reason for the user  (E)

(A) The first entry stays: a consequence of the failure does not replace it. (B) A neighbour of rank 2 notices at once.
A rank without a connection to rank 2 notices when one of its own neighbours aborts. (C) While the main thread is in a
layer, or in a collective that nobody else will join, only a thread can act. (D) The store ends with process 0. (E) See
`FailureBoard.becomes_reporter`.

Nobody raises in four other cases, and each becomes an entry or an error like the one above:

* *A hang*: an operation takes longer than the timeout. The process enters "asker"; every watchdog, which looks once a
  second, answers with its "place"; the asker enters all places as the failure, and (B) to (E) follow.
* *A killed process*: the process that started it enters how it ended (`FailureBoard.lost`). Its neighbours see their
  connections close, wait `patience` for that entry, and say without one that nobody has said why.
* *A signal to end* (SIGTERM) reaches a process that waits for one that hangs: its watchdog enters that it was asked to
  end, and for what it waits.
* *Process 0 itself*, and the store with it: stopped, it does not answer (`StoreSilentError`); ended, its connection
  closes (`StoreGoneError`). Nothing can be entered any more; each of the others ends with what it knows.
"""
