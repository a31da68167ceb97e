"""What is loaded in the server from which processes of tests are forked (tests/support/ranks.py): all that a rank or a
run imports, and the digest of the package's source, which ranks compare before they start.

What a rank imports is what the starter of ranks has (cli/rank_starter.py), and objects are kept out of garbage
collection as there.
"""

from __future__ import annotations

from importlib import import_module

from moefold.cli.rank_starter import import_all
from tests.support.interpreter import patch_once_per_launch

MODULES = (
    *("pytest", "hypothesis", "torch.distributed.checkpoint"),
    *("moefold.train.parity", "moefold.layout.process_groups"),
)

patch_once_per_launch()
for name in MODULES:
    import_module(name)
import_all()
