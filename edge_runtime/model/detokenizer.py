"""Text out of a stream of token ids: whole characters only, and nothing of a stop string.

Knows no tokenizer but the function that decodes a list of ids.
"""

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"
MAX_INCOMPLETE = 3  # a character of 4 bytes that lacks one shows as at most this many U+FFFD
LONG_WINDOW = 16


class IncrementalDetokenizer:
    """Turns ids into text as they come; `push` and `flush` together give the whole decode.

    A token may hold part of a character, so text that ends in U+FFFD is held back until the next tokens complete
    it or `flush` is called. Ids that are garbage come out as the same U+FFFD that the whole decode has, a few
    tokens late. (Decoders that join bytes over many tokens, such as sentencepiece's byte fallback, may turn
    garbage into another number of U+FFFD than the whole decode does; valid text is equal there too.)

    decode   list of ids -> text
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        # The window's first `_context` ids are text already given out: decoders that drop the first token's space
        # must not see a fresh start. `_given` characters of the window's text are out.
        self._window: list[int] = []
        self._context = 0
        self._given = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes, often all of its own, sometimes nothing."""
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = _stable_length(text)
        piece = text[self._given : stable]
        if stable == len(text):
            if piece:
                self._slide()
            elif self._context == len(self._window) - 1:
                self._window.pop()  # shows nothing, as special tokens do: no use as context
        else:
            self._given = max(self._given, stable)
            if len(self._window) > LONG_WINDOW:
                self._cut(text)
        return piece

    def flush(self) -> str:
        """What is still held back, at the end of an answer."""
        text = self._decode(self._window)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _slide(self) -> None:
        """All text is out: keep only the newest tokens, as context for the next."""
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._given = len(self._decode(self._window))

    def _cut(self, text: str) -> None:
        """A long run of garbage: cut the window where both sides decode alone to what they do together."""
        for at in range(len(self._window) - 1, len(self._window) - 1 - MAX_INCOMPLETE - 1, -1):
            before, after = self._decode(self._window[:at]), self._decode(self._window[at:])
            if before + after == text and len(before) <= self._given:
                self._window = self._window[at:]
                self._context = 0
                self._given -= len(before)
                return


def _stable_length(text: str) -> int:
    """Characters that no later token can change."""
    length = len(text)
    while length > len(text) - MAX_INCOMPLETE and text[length - 1 : length] == INCOMPLETE:
        length -= 1
    return length


class StopMatcher:
    """Passes text through until a stop string is complete; the stop and all after it are never given out.

    Holds back only the longest end of the text that may still become a stop. Where two stops complete with the
    same character, the longer one counts; otherwise the one that is complete first, however the text is cut.
    """

    def __init__(self, stops: Sequence[str] | str = ()) -> None:
        self._stops = tuple(stop for stop in ((stops,) if isinstance(stops, str) else stops) if stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that can be given out now."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back and became no stop, at the end of an answer."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
