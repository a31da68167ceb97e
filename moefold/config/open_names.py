"""Open sets of names: legal values of a key such as `parallel.dispatcher`, each with a line for --help.

A closed set of values is a `Literal` type. An open set is an `OpenNames`: built-in names are listed below, and a
package can register more before a configuration is read. The names are in this file, on the lowest floor, so that
config, `--help`, explain and the planner read one list without torch. Higher floors attach code to a name:
dispatch/catalog.py a price, dispatch/build.py a builder, model/ an attention, optim/ a rule, data/ a source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from moefold.config.errors import UserError, one_of
from moefold.printable import printable_text

LEGAL_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")


class OpenNames:
    """Names of one kind, in the order in which they were added. `kind` is used in messages: "no dispatcher ..."."""

    def __init__(self, kind: str, builtin: Mapping[str, str]):
        self.kind = kind
        self.builtin = tuple(builtin)
        self.lines = dict(builtin)

    def add(self, name: str, says: str) -> None:
        """Accept one more name; `says` is its line in --help. A name may be added again with the same line, so that a
        module may be imported twice."""
        if not LEGAL_NAME.fullmatch(name):
            raise UserError(
                f'a {self.kind} cannot be called "{printable_text(name)}"; expected small letters, digits and _, '
                "such as my_own"
            )
        if self.lines.get(name, says) != says:
            raise UserError(f'there is a {self.kind} "{name}" already ({self.lines[name]}); choose another name')
        self.lines[name] = says

    def remove(self, name: str) -> None:
        """Remove a name that was added; built-in names cannot be removed."""
        if name in self.builtin:
            raise UserError(f'the {self.kind} "{name}" is built in and cannot be removed; expected one that was added')
        self.lines.pop(name, None)

    def says(self, name: str) -> str:
        return self.lines[self.require(name)]

    def require(self, name: str) -> str:
        """The name itself if it is known; otherwise a refusal with the nearest."""
        return one_of(self.kind, name, self.lines)

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)

    def __contains__(self, name: object) -> bool:
        return name in self.lines

    def __len__(self) -> int:
        return len(self.lines)


DISPATCHER_NAMES = OpenNames(
    "dispatcher",
    {
        "auto": "the dispatcher of least predicted time over the measured links between ranks",
        "all_gather": "every rank gathers all tokens and reduce-scatters the results",
        "all_to_all": "one copy of a token for each chosen expert",
        "dedup": "one copy of a token for each distinct rank of its experts",
        "hierarchical": "one copy for each distinct node, then one for each distinct rank of the node",
        "deepep": "as dedup, by DeepEP's kernels (NVLink and RDMA); needs the package deep_ep, CUDA and bf16",
        "symmetric": "as dedup, written by ranks of one machine into each other's memory, without a wait of the host",
    },
)

ROUTER_SCORE_NAMES = OpenNames(
    "router score",
    {
        "softmax": "softmax of the router logits over all experts",
        "softmax_chosen": "softmax over the chosen experts' logits",
        "sigmoid": "sigmoid of each router logit",
    },
)

ATTENTION_NAMES = OpenNames(
    "attention kind",
    {
        "gqa": "grouped-query attention",
        "mla": "multi-head latent attention: keys and values from one low-rank latent",
    },
)

OPTIMIZER_NAMES = OpenNames(
    "optimizer rule",
    {
        "adamw": "AdamW: Adam with decoupled weight decay",
        "muon": "Muon: orthogonalised momentum of each matrix, AdamW for all else",
    },
)

DATA_SOURCE_NAMES = OpenNames(
    "data source",
    {
        "stdlib": "source code of Python's standard library",
        "files": "the files named by data.files",
        "prepared": "the folders named by data.files, written by moefold data prepare",
        "zipf": "random tokens with a Zipf distribution",
    },
)
