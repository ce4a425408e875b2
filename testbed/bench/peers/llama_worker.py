"""llama.cpp through `llama-cpp-python`'s plain bindings, greedy. Runs in the environment where that package is installed."""

import ctypes
import os
from pathlib import Path
from typing import Any

from testbed.bench.peers.worker import Took, moment, serve

ROWS = 512  # rows of a batch, as the program's own default


class LlamaRunner:
    """One GGUF."""

    def __init__(self, order: dict[str, Any]) -> None:
        import llama_cpp  # type: ignore[import-not-found]
        import numpy as np

        self._lib, self._np = llama_cpp, np
        _load_backends(llama_cpp)
        llama_cpp.llama_backend_init()
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(
            order["gguf"].encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {order['gguf']}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = order["kv_tokens"]
        settings.n_batch = settings.n_ubatch = max(ROWS, order["context_tokens"])
        settings.n_ubatch = ROWS
        settings.n_seq_max = order["max_requests"]
        settings.n_threads = settings.n_threads_batch = order["threads"]
        settings.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(settings.n_batch, 0, 1)
        said = llama_cpp.llama_print_system_info().decode()
        self.facts = {"version": f"llama-cpp-python {llama_cpp.__version__}, {' '.join(said.split())}"}

    def decode(self, prompts: list[list[int]], steps: int) -> Took:
        self._clear()
        last = [self._prompt(prompt, sequence)[0] for sequence, prompt in enumerate(prompts)]
        began = moment()
        for step in range(steps):
            rows = [(token, len(prompts[n]) + step, n, True) for n, token in enumerate(last)]
            last = self._run(rows)
        return Took(began, moment(), steps * len(prompts))

    def prefill(self, prompt: list[int]) -> Took:
        self._clear()
        began = moment()
        self._prompt(prompt, 0)
        return Took(began, moment(), len(prompt))

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)

    def _prompt(self, prompt: list[int], sequence: int) -> list[int]:
        return self._run([(token, at, sequence, at == len(prompt) - 1) for at, token in enumerate(prompt)])

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decode rows of (token, position, sequence, whether it is answered): the best next token of those that are."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, answered) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = answered
        if self._lib.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp cannot decode: its context is too small")
        best = []
        for index, row in enumerate(rows):
            if row[3]:
                logits = self._lib.llama_get_logits_ith(self._context, index)
                scores = self._np.ctypeslib.as_array(logits, shape=(self._vocab_size,))
                best.append(int(scores.argmax()))
        return best


def _load_backends(llama_cpp: Any) -> None:
    """Builds that keep their backends in files of their own want to be told where."""
    from llama_cpp import _ggml

    folder = os.environ.get("LLAMA_CPP_LIB_PATH") or str(Path(llama_cpp.__file__).parent / "lib")
    if hasattr(_ggml.libggml, "ggml_backend_load_all_from_path"):
        _ggml.libggml.ggml_backend_load_all_from_path(folder.encode())


if __name__ == "__main__":
    serve(LlamaRunner)
