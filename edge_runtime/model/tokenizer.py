"""Text to token ids and back: tokenizer.json, the chat template, and the ids that end an answer.

Knows no tensor. `detokenizer.py` turns a stream of ids back into text as it comes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from edge_runtime.errors import CheckpointError, RequestError, cut
from edge_runtime.model.chat_template import ChatTemplate
from edge_runtime.model.detokenizer import IncrementalDetokenizer
from edge_runtime.model.json_file import read_json, read_json_if_present

TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one model folder.

    eos_token_ids    ids that end an answer
    eos_source       the file that says so
    special_tokens   `bos_token`, `eos_token`, ... -> text, as templates see them
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        eos_source: Path | None = None,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        content_hash: str = "",
    ) -> None:
        backend.no_truncation()  # settings for training batches, which some files carry
        backend.no_padding()
        self._backend = backend
        self.eos_token_ids = eos_token_ids
        self.eos_source = eos_source
        self.special_tokens = dict(special_tokens or {})
        self._template_source = chat_template
        self._template: ChatTemplate | None = None
        self.content_hash = content_hash
        self._longest_token: int | None = None

    @classmethod
    def open(cls, folder: str | Path) -> "Tokenizer":
        """Read a model folder's tokenizer."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        read_json(path)  # says what is wrong with it better than the library does
        content = path.read_bytes()
        try:
            backend = Backend.from_buffer(content)
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path} is not a tokenizer: {error}; copy the file again") from error
        settings = folder / "tokenizer_config.json"
        config = read_json_if_present(settings)
        try:
            special_tokens = _special_tokens(config)
            _add_tokens(backend, config, special_tokens)
            chat_template = _chat_template(folder, config)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{settings} or chat_template.jinja beside it is not what tokenizers have there ({error!r}); copy them again"
            ) from error
        eos_token_ids, eos_source = _eos_token_ids(folder)
        return cls(
            backend,
            eos_token_ids=eos_token_ids,
            eos_source=eos_source,
            special_tokens=special_tokens,
            chat_template=chat_template,
            content_hash=hashlib.blake2b(content, digest_size=16).hexdigest(),
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return self._template_source is not None

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows; a model's embedding may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def longest_token(self) -> int:
        """Characters of the longest token, found once."""
        if self._longest_token is None:
            self._longest_token = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        return self._longest_token

    def refuse_hopeless(self, num_chars: int, context_tokens: int) -> None:
        """Refuse a text that cannot fit whatever its tokens are, before time is spent on it.

        A text without spaces takes seconds per million characters to cut into tokens. No token stands for more
        characters than the longest has, but for what a normaliser joins: at most four into one.
        """
        least = num_chars // (4 * self.longest_token)
        if least > context_tokens:
            raise RequestError(
                f"the prompt has {num_chars} characters, which are at least {least} tokens, but the context holds "
                f"{context_tokens}; shorten the prompt",
                "prompt",
            )

    def encode(self, text: str) -> list[int]:
        """Ids of raw text with the special tokens the model's own post-processor adds (such as bos)."""
        if not text:
            raise RequestError("the prompt is empty; give at least one character", "prompt")
        return self._ids(text, add_special_tokens=True)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation; the template writes bos itself where it wants one, so none is added."""
        return self._ids(
            self.render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables),
            add_special_tokens=False,
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation as the model reads it.

        messages    each with `role` and `content`
        variables   more names for the template, such as `tools`
        """
        if self._template_source is None:
            raise RequestError("this model has no chat template; send the prompt as raw text", "prompt")
        if not messages:
            raise RequestError("the list of messages is empty; give at least one", "prompt")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(
                    f"message {index} must be an object with a role, found {message!r:.80}", "prompt"
                )
        if self._template is None:
            self._template = ChatTemplate(self._template_source)
        names = {"tools": None, "documents": None} | self.special_tokens | dict(variables or {})
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **names)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of whole ids. Bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self) -> IncrementalDetokenizer:
        """A detokenizer for one answer."""
        return IncrementalDetokenizer(self.decode)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:  # half of a surrogate pair
            raise RequestError(f"the prompt is not valid Unicode text: {error}", "prompt") from error
        if not ids:
            raise RequestError(f"the prompt {text!r:.40} has no tokens; give at least one", "prompt")
        return ids


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, Mapping) else value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {key: text for key in TOKEN_KEYS if (text := _token_text(config.get(key)))}
    return named


def _more_special_tokens(config: Mapping[str, Any]) -> list[str]:
    found = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or []
        more = more.values() if isinstance(more, Mapping) else more
        found += [text for value in more if (text := _token_text(value))]
    return found


def _add_tokens(backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json knows, and mark the named ones as special."""
    known = backend.get_added_tokens_decoder()
    decoder = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        if int(token_id) not in known and isinstance(entry, Mapping):
            flags = {k: bool(entry.get(k, False)) for k in ("single_word", "lstrip", "rstrip", "normalized")}
            token = AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    for text in [*special_tokens.values(), *_more_special_tokens(config)]:
        if text not in present:
            backend.add_special_tokens([AddedToken(text, special=True)])


def _eos_token_ids(folder: Path) -> tuple[frozenset[int], Path | None]:
    """generation_config.json says what ends an answer; where it is silent, config.json does. And the file that did."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = read_json_if_present(path).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
                raise CheckpointError(
                    f"{path}: found eos_token_id {cut(repr(value))}, expected an id, a whole number from 0 on, or a list of ids; "
                    "correct it, or copy the file again"
                )
            return frozenset(ids), path
    return frozenset(), None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A chat_template.jinja file wins over tokenizer_config.json, which may hold one text or several named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
