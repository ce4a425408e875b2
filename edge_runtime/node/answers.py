"""From token ids to the text a client sees: detokenising, stop strings, and the end of an answer.

Pure: knows tokens and text, no socket and no engine. One `AnswerStream` per request.
"""

from edge_runtime.model.detokenizer import IncrementalDetokenizer, StopMatcher


class AnswerStream:
    """Turns one request's tokens into text that may be sent; what follows a stop string is swallowed.

    num_tokens  tokens of the answer so far, the one that completed a stop string included
    stopped     a stop string is complete: the answer ends here, whatever the engine still brings
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop)
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

    def push(self, token_id: int) -> str:
        """Text that this token sets free; empty while a character or a possible stop string is incomplete."""
        self.num_tokens += 1
        return self._matcher.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Text still held back when the answer ends by itself."""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
