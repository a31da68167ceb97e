"""The meeting of ranks under torchrun on several nodes: all agree on the name of their attempt.

Torchrun's agents keep one store for all attempts, and each counts its own restarts: a node that was replaced begins at
0 again, and a node that restarts because another one did counts nothing. Ranks that took these numbers for a name would
wait for each other in different places. So each attempt has a name that its rank 0 makes up, and tells whoever asks:

    rank 3    asks: question 17, "who is rank 0?", with a token of its own  ->  waits for the answer to this token
    rank 0    answers one question after the other, for as long as it lives

Questions of ranks that are gone are answered too; nobody reads that.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

import torch.distributed as dist

from moefold.layout.environment import Rendezvous

LOCK = threading.Lock()
NAMES: dict[Rendezvous, str] = {}  # of this process, which asks once

Connect = Callable[[Rendezvous], dist.Store]  # opens a connection to the store: calls on one wait for each other


def attempt_of_all(place: Rendezvous, connect: Connect) -> str:
    """The name of this attempt, the same on all ranks."""
    if not place.agent or place.size == place.local_size:
        return place.attempt
    with LOCK:
        if place not in NAMES:
            store = connect(place)
            NAMES[place] = ask_rank_zero(store) if place.rank else begin_answering(store)
        return NAMES[place]


def ask_rank_zero(store: dist.Store) -> str:
    token = secrets.token_hex(8)
    number = store.add("meeting/questions", 1)
    store.set(f"meeting/question/{number}", token)
    answer = store.get(f"meeting/answer/{token}")  # waits
    return answer.decode()


def begin_answering(store: dist.Store) -> str:
    name = secrets.token_hex(8)
    threading.Thread(target=answer_questions, args=(name, store), daemon=True, name="meeting").start()
    return name


def answer_questions(name: str, store: dist.Store) -> None:
    number = 1
    while True:
        question = f"meeting/question/{number}"
        try:
            store.wait([question])
        except dist.DistStoreError:  # nobody has asked for a while
            continue
        except RuntimeError:  # the store is gone
            return
        token = store.get(question).decode()
        store.set(f"meeting/answer/{token}", name)
        number += 1
