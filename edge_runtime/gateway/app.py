"""The HTTP face: routes, status codes, event streams. What bodies mean is known by `openai`, who answers by `answering`."""

import asyncio
import contextlib
import hmac
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from edge_runtime.errors import ClusterError, EdgeError, RequestError, UserError
from edge_runtime.gateway import openai
from edge_runtime.gateway.answering import Answering, Ended, Part, first_error
from topology.errors import why_unread

MAX_BODY_BYTES = 2 << 20  # of a prompt on the wire as well
BODY_S = 30.0  # a body that takes longer is given up
RETRY_AFTER_S = 2
INVALID, UNAVAILABLE = "invalid_request_error", "service_unavailable"
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class Gateway:
    """One cluster's OpenAI API.

    model        the name under which clients ask for it
    api_key      what clients must send as bearer token; None lets in everybody who reaches the port
    wall_s       seconds since 1970, for `created`
    """

    def __init__(
        self,
        answering: Answering,
        *,
        model: str,
        api_key: str | None,
        wall_s: Callable[[], float],
        token_text: openai.TokenText,
    ) -> None:
        self._answering = answering
        self._model = model
        self._api_key = api_key
        self._wall_s = wall_s
        self._token_text = token_text
        self._started_s = int(wall_s())

    def app(self) -> Starlette:
        """The application to serve."""
        return Starlette(
            routes=[
                Route(
                    "/v1/chat/completions", self._guarded(partial(self._ask, is_chat=True)), methods=["POST"]
                ),
                Route("/v1/completions", self._guarded(partial(self._ask, is_chat=False)), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models)),
                Route("/v1/models/{name:path}", self._guarded(self._one_model)),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            if self._api_key is not None:
                scheme, _, token = request.headers.get("authorization", "").partition(" ")
                is_right = hmac.compare_digest(token.strip().encode(), self._api_key.encode())
                if scheme.lower() != "bearer" or not is_right:
                    return _failed(401, "the API key is missing or wrong; send it as bearer token", INVALID)
            return await answer(request)

        return guarded

    async def _models(self, request: Request) -> Response:
        return JSONResponse(openai.models(self._model, self._started_s))

    async def _one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self._model:
            return self._no_model(request.path_params["name"])
        return JSONResponse(openai.model_entry(self._model, self._started_s))

    async def _health(self, request: Request) -> Response:
        """200 while prompts are answered, though some node may be missing; says no more than that: it asks for no key."""
        try:
            status = await asyncio.to_thread(self._answering.status)
        except EdgeError:
            return JSONResponse({"ready": False, "state": "waiting"}, 503)
        state = status["state"]
        return JSONResponse({"ready": state == "ready", "state": state}, 503 if state == "waiting" else 200)

    def _no_model(self, name: str) -> Response:
        detail = f"model {name!r:.80} is not served here; the model is {self._model!r}"
        return _failed(404, detail, INVALID, "model_not_found", "model")

    async def _ask(self, request: Request, *, is_chat: bool) -> Response:
        try:
            ask = openai.read_ask(await _body(request), is_chat=is_chat)
        except RequestError as error:
            return _told(error)
        except _TooLarge as error:
            return _failed(413, str(error), INVALID)
        except TimeoutError:
            return _failed(408, f"the body did not come within {BODY_S:.0f} s", INVALID)
        except ClientDisconnect:
            return Response(status_code=499)
        if ask.model not in ("", self._model):
            return self._no_model(ask.model)
        if self._answering.is_full:
            return _failed(503, "too many requests are being answered; try again", UNAVAILABLE)
        responder = openai.Responder(
            ask,
            request_id=uuid.uuid4().hex,
            model=self._model,
            created_s=int(self._wall_s()),
            token_text=self._token_text,
        )
        if not ask.streams:
            return await self._whole(request, ask, responder)
        events = self._answering.run(ask.prompts)
        try:  # until the first token comes, a failure still has a status code of its own
            first = await _unless_gone(request, anext(events))
        except EdgeError as error:
            return _told(error)
        if first is None:
            return Response(status_code=499)
        if isinstance(first, Ended) and (failure := first_error(first.answers)) is not None:
            return _told(failure)
        return StreamingResponse(
            _stream(ask, responder, first, events),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def _whole(self, request: Request, ask: openai.Ask, responder: openai.Responder) -> Response:
        try:
            answers = await _unless_gone(request, self._collect(ask))
        except EdgeError as error:
            return _told(error)
        if answers is None:
            return Response(status_code=499)
        failure = first_error(answers)
        return _told(failure) if failure is not None else JSONResponse(responder.whole(answers))

    async def _collect(self, ask: openai.Ask) -> list[Any]:
        async with contextlib.aclosing(self._answering.run(ask.prompts)) as events:
            async for event in events:
                if isinstance(event, Ended):
                    return event.answers
        raise ClusterError("the answers ended without an end")


async def _stream(
    ask: openai.Ask,
    responder: openai.Responder,
    first: Part | Ended,
    rest: AsyncGenerator[Part | Ended],
) -> AsyncIterator[bytes]:
    """Server-sent events. Whatever happens, the stream ends with a reason and `[DONE]`."""
    try:
        async with contextlib.aclosing(rest):
            if ask.is_chat:
                for index in range(len(ask.prompts)):
                    yield _event(responder.first(index))
            event = first
            while not isinstance(event, Ended):
                yield _event(responder.part(event.place, event.tokens.text, event.tokens.logprobs or ()))
                event = await anext(rest)
            for index, answer in enumerate(event.answers):
                failure = answer.error()
                yield _event(_error_body(failure) if failure is not None else responder.last(index, answer))
            if ask.includes_usage:
                yield _event(responder.usage_chunk(event.answers))
    except EdgeError as error:
        yield _event(_error_body(error))
    yield DONE


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


class _TooLarge(Exception):
    pass


async def _body(request: Request) -> object:
    received = bytearray()
    async with asyncio.timeout(BODY_S):
        async for chunk in request.stream():
            received += chunk
            if len(received) > MAX_BODY_BYTES:
                raise _TooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        return json.loads(received)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON that can be read: {why_unread(error)}") from error


async def _unless_gone(request: Request, awaited: Awaitable[T]) -> T | None:
    """What is awaited; None, and it is given up, if the reader goes away before."""
    task = asyncio.ensure_future(awaited)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _told(error: EdgeError) -> Response:
    """A failure before anything was sent."""
    return JSONResponse(
        _error_body(error),
        400 if isinstance(error, UserError) else 503,
        headers={} if isinstance(error, UserError) else {"Retry-After": str(RETRY_AFTER_S)},
    )


def _error_body(error: EdgeError) -> dict[str, Any]:
    kind = INVALID if isinstance(error, UserError) else UNAVAILABLE
    return openai.error(str(error), kind, field=getattr(error, "field", None))


def _failed(
    status: int, message: str, kind: str, code: str | None = None, field: str | None = None
) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    return JSONResponse(openai.error(message, kind, code, field), status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _failed(error.status_code, f"{request.method} {request.url.path:.80}: {error.detail}", INVALID)
