"""What is loaded in the server from which processes of tests are forked (tests/support/ranks.py): all that a rank or a
run imports, and the digest of the package's source, which ranks compare before they start.

Objects that are there by then are kept out of garbage collection: a forked process would need half a second to go
through all of them, and would copy every page of memory that has one.
"""

from __future__ import annotations

import gc
from importlib import import_module

MODULES = (
    *("pytest", "hypothesis", "torch.distributed.checkpoint"),
    "torch.nn.attention.bias",  # with torch's compiler
    *("moefold.train.loop", "moefold.train.parity", "moefold.cli.main", "moefold.cli.train"),
    *("moefold.layout.process_groups", "moefold.layout.numa", "moefold.watch.hang_watch"),
)

for name in MODULES:
    import_module(name)
import_module("moefold.layout.agreement").source_digest()
gc.freeze()
