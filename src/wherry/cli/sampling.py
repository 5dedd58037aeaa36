"""One rank of `wherry generate`: a model in an engine, prompts, and the text that comes of them."""

from __future__ import annotations

import argparse
import json
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

import wherry
from wherry.cli.generate import build_parser, weights_in
from wherry.errors import WherryError, printable
from wherry.integrations.model_folder import read_model, read_tokenizer, tokenizer_of, with_adapter
from wherry.observe.log import show_unless_shown
from wherry.observe.memory import free_on_gpu
from wherry.regular import read_regular
from wherry.tiers.streams import accelerator

if TYPE_CHECKING:
    from wherry.engine import Engine
    from wherry.parallel.comm import Comm

# How long other ranks wait for a line that a person writes, before they ask anew.
PATIENCE_S = 60.0
# Elements that are gathered ahead of use, at most.
AHEAD = 50_000_000
_LONGEST_CONFIG = 1 << 20


def write(arguments: argparse.Namespace) -> int:
    """Answer the prompt, or those that come; every rank writes the same, and rank 0 shows it."""
    show_unless_shown()
    transformers.logging.set_verbosity_error()  # of flags that we set ourselves
    transformers.logging.disable_progress_bar()
    writer = Writer(arguments)
    try:
        given = [arguments.prompt] if arguments.prompt is not None else prompts(writer.engine.comm)
        for prompt in given:
            writer.go_on(prompt)
    finally:
        writer.engine.close()
    return 0


class Writer:
    """A model and its tokenizer, which go on from prompts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        folder = Path(arguments.model)
        self.tokenizer = read_tokenizer(tokenizer_of(folder, arguments.adapter), "generate")
        model = _model(folder, weights_in(folder, arguments.dtype)[1], arguments)
        self.chats = bool(self.tokenizer.chat_template) and not arguments.raw
        self.engine = _placed(model, arguments)
        self.model: Any = self.engine.module
        comm, device = self.engine.comm, self.engine.device
        torch.manual_seed(comm.gather_objects(arguments.seed if arguments.seed is not None else torch.seed())[0])
        text = model.config.get_text_config()
        self.most = arguments.max_new_tokens
        self.positions: int | None = getattr(text, "max_position_embeddings", None)
        self.ends = sorted({*_ends(folder, model), self.tokenizer.eos_token_id} - {None})
        self.settings = transformers.GenerationConfig(
            do_sample=arguments.temperature > 0,
            **({"temperature": arguments.temperature} if arguments.temperature > 0 else {}),
            **{name: value for name in ("top_k", "top_p") if (value := getattr(arguments, name)) is not None},
            **({"top_k": 0} if arguments.top_k is None else {}),
            eos_token_id=self.ends or None,
            pad_token_id=self.ends[0] if self.ends else 0,
        )
        known = sorted(set(self.tokenizer.get_vocab().values()))
        self.processors = transformers.LogitsProcessorList([_Scores(comm, torch.tensor(known, device=device))])

    def go_on(self, prompt: str) -> None:
        """Show the prompt and what the model makes of it, as it makes it."""
        ids = self._ids(prompt).to(self.engine.device)
        if not ids.numel():
            raise WherryError("generate: the prompt is empty, and this model has no token that begins a text")
        stream = Stream(self.tokenizer, shown=self.engine.comm.rank == 0)
        if not self.chats:
            stream.show(prompt)
        left = self.most
        while left > 0:
            if self.positions is not None and ids.shape[1] >= self.positions:
                ids = ids[:, -max(1, self.positions // 2) :]
            room = left if self.positions is None else min(left, max(1, self.positions - ids.shape[1]))
            self.settings.max_new_tokens = room
            before = ids.shape[1]
            ids = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self.settings,
                logits_processor=self.processors,
                streamer=stream,
            )
            left -= room
            if ids.shape[1] < before + room or int(ids[0, -1]) in self.ends:
                break
        stream.finish()

    def _ids(self, prompt: str) -> torch.Tensor:
        if self.chats:
            asked = [{"role": "user", "content": prompt}]
            try:
                prompt = self.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # a template is a program of its own
                raise WherryError(f"generate: the chat template fails: {error}; give --raw to go without") from error
        found: torch.Tensor = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=not self.chats).input_ids
        return found


# The model.


def _model(folder: Path, dtype: torch.dtype, arguments: argparse.Namespace) -> Any:
    """On the meta device, with values that are found in the folder's files."""
    model = read_model(folder, dtype, "generate", arguments.bits)
    model.config.use_cache = True
    if arguments.adapter is not None:
        model = with_adapter(model, Path(arguments.adapter), "generate")
        for parameter in model.parameters():
            if not parameter.is_meta:  # what has values is the adapter's
                parameter.data = parameter.data.to(dtype)
    return model.eval().requires_grad_(False)


def _placed(model: Any, arguments: argparse.Namespace) -> Engine:
    offload: dict[str, Any] = {"device": arguments.offload_param}
    if arguments.offload_param == "nvme":
        offload |= {"nvme_path": arguments.nvme_path, "max_in_cpu": 0}
    whole = arguments.nproc == 1 and arguments.offload_param == "none"
    zero: dict[str, Any] = {"stage": 0} if whole else {"stage": 3, "offload_param": offload}
    device = accelerator()
    if device is not None and not whole:  # what is gathered ahead leaves room for what runs
        zero["stage3_prefetch_bucket_size"] = min(AHEAD, free_on_gpu(device) // 8 // model.dtype.itemsize)
    return wherry.initialize(model=model, config={"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1})[0]


def _ends(folder: Path, model: Any) -> list[int]:
    """The tokens after which a text has ended."""
    found = model.config.get_text_config().eos_token_id
    path = folder / "generation_config.json"
    if path.exists():
        try:
            found = json.loads(read_regular(path, _LONGEST_CONFIG)).get("eos_token_id", found)
        except (OSError, ValueError, AttributeError) as error:
            raise WherryError(f"generate: {path} cannot be read: {error}") from error
    return [token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int)]


class _Scores(transformers.LogitsProcessor):
    """What the next token is drawn from: those that the tokenizer knows, and the same scores on every rank.

    A model may have more rows than that; and a last bit that differs between devices would part the ranks.
    """

    def __init__(self, comm: Comm, known: torch.Tensor) -> None:
        self.comm, self.known = comm, known

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        known = self.known[self.known < scores.shape[1]]
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, known] = scores[:, known]
        self.comm.broadcast(chosen).wait()
        return chosen


# Text.


class Stream:
    """Shows tokens as text as soon as they are some: a character may take several."""

    # Of so many the text is made anew each time; the last few of them go over, as a token's text may depend on them.
    PIECE, OVER = 64, 8

    def __init__(self, tokenizer: Any, *, shown: bool) -> None:
        self._tokenizer = tokenizer
        self._is_shown = shown
        self._ids: list[int] = []
        self._shown = 0
        self._text = ""
        self._is_prompt = True

    def put(self, ids: torch.Tensor) -> None:
        """Called by `generate`: with what it is given at first, then with each token."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._ids += ids.flatten().tolist()
        text = self._decoded()
        whole = len(text) - text.endswith("\N{REPLACEMENT CHARACTER}")
        self.show(text[self._shown : whole])
        self._shown = max(self._shown, whole)
        if whole == len(text) and len(self._ids) > self.PIECE:
            del self._ids[: -self.OVER]
            self._shown = len(self._decoded())

    def end(self) -> None:
        """Called by `generate`. The text may go on in another call."""
        self._is_prompt = True

    def finish(self) -> None:
        self.show(self._decoded()[self._shown :])
        if not self._text.endswith("\n"):
            self.show("\n")

    def show(self, text: str) -> None:
        self._text = text or self._text
        if self._is_shown:
            # A terminal is not given what would move its cursor.
            print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def prompts(comm: Comm) -> Iterator[str]:
    """The lines of standard input, on every rank, until an empty one or its end."""
    # Unbuffered, so that what is waited for is what has not been read.
    source = open(0, "rb", buffering=0, closefd=False) if comm.rank == 0 else None  # noqa: SIM115
    by_hand = comm.rank == 0 and sys.stdin.isatty()
    while True:
        if by_hand:
            print("prompt> ", end="", file=sys.stderr, flush=True)
        said = None
        while said is None:
            # The others wait for no longer than a collective may take.
            if source is not None and select.select([source], [], [], PATIENCE_S)[0]:
                said = source.readline()
            said = comm.gather_objects(said)[0]
        line = said.decode(errors="replace").rstrip("\r\n")
        if not line:
            if by_hand and not said:
                print(file=sys.stderr)  # after Ctrl-D
            return
        yield line


if __name__ == "__main__":
    sys.exit(write(build_parser().parse_args(sys.argv[1:])))
