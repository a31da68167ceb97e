"""Text of one sequence as its tokens come: whole characters only, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Sequence

from moefold.data.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what tokenizers make of bytes that are no whole character
CONTEXT = 6  # tokens before the next ones that are decoded with them: spaces may depend on them


class TextStream:
    """`text` is all that has been given out. `is_done`: an end token or a stop string has come."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], ends: Sequence[int], stops: Sequence[str]):
        self.tokenizer = tokenizer
        self.ends = ends
        self.stops = stops
        self.ids = list(prompt)
        self.decoded = len(self.ids)  # tokens whose text is known
        self.first = max(0, self.decoded - CONTEXT)
        self.waiting = ""  # text that may be the beginning of a stop string
        self.text = ""
        self.is_done = False

    def add(self, token: int) -> str:
        """The text that the token completes."""
        if self.is_done:
            return ""
        if token in self.ends:
            return self.finish()
        self.ids.append(token)
        return self.give_out(self.new_text())

    def new_text(self, is_last: bool = False) -> str:
        before = self.tokenizer.decode(self.ids[self.first : self.decoded])
        now = self.tokenizer.decode(self.ids[self.first :])
        if now.endswith(UNFINISHED) and not is_last:
            return ""
        self.first = max(self.first, self.decoded - CONTEXT)
        self.decoded = len(self.ids)
        return now[len(before) :]

    def give_out(self, new: str) -> str:
        """New text up to a stop string, without an end that may begin one."""
        known = self.waiting + new
        places = [known.find(stop) for stop in self.stops]
        found = [place for place in places if place >= 0]
        if found:
            self.is_done = True
            certain = known[: min(found)]
            self.waiting = ""
        else:
            held = held_back(known, self.stops)
            certain = known[: len(known) - held]
            self.waiting = known[len(certain) :]
        self.text += certain
        return certain

    def finish(self) -> str:
        """The rest of the text, where no stop string has come."""
        if self.is_done:
            return ""
        rest = self.give_out(self.new_text(is_last=True))
        last = self.waiting
        self.waiting = ""
        self.text += last
        self.is_done = True
        return rest + last


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters may begin a stop string."""
    longest = 0
    for stop in stops:
        for count in range(1, len(stop)):
            if text.endswith(stop[:count]):
                longest = max(longest, count)
    return longest
