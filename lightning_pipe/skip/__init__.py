"""Skip connections between layers, past the layers between them.

A layer *stashes* a tensor under a name and a later one *pops* it; the pipeline carries it from the stage of the one to
the stage of the other, straight if they declare it, and the gradient back. Without a pipeline the same layers work in
an ordinary module. Plain code between the layers of a sequence needs none of this: what it keeps is carried by itself.
The interface is torchgpipe's (Kim et al., arXiv:2004.09910, section 3.3.1), so that networks written for it run here.
"""

from lightning_pipe.skip.checks import verify, verify_skippables
from lightning_pipe.skip.layers import SkippableMixin, pop, skippable, stash
from lightning_pipe.skip.store import Namespace, SkipError, SkipKey, StepStore, Store, put, stored_in, take

__all__ = [
    "Namespace",
    "SkipError",
    "SkipKey",
    "SkippableMixin",
    "StepStore",
    "Store",
    "pop",
    "put",
    "skippable",
    "stash",
    "stored_in",
    "take",
    "verify",
    "verify_skippables",
]
