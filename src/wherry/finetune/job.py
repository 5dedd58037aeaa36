"""One rank of `wherry finetune`, from flags to exit status."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from wherry.checkpoint.export import IN_RUN
from wherry.errors import NonFiniteError, WherryError
from wherry.finetune.options import FILE, Options, as_file, parse
from wherry.integrations.model_folder import FINISHED, folder_on, opened
from wherry.observe.log import logger

if TYPE_CHECKING:
    from wherry.config import Config
    from wherry.parallel.topology import Topology
    from wherry.plan.model_source import ModelSource

T = TypeVar("T")
DEFAULT_SEED = 1234
DEFAULT_SEQUENCE = 1024


def main(argv: list[str]) -> int:
    """Fine-tune as this rank of the group that the environment describes. The process is the job's own."""
    from wherry.observe.log import show_unless_shown

    show_unless_shown()
    options = parse(argv)
    with opened(where(options.model), "finetune") as folder:
        return FineTuning(options, folder).run()


def where(model: str) -> Path:
    """The folder that MODEL names, of this machine or fetched from the hub."""
    return folder_on(model, "finetune", fetch=True)


def check(options: Options) -> bool:
    """Raise what is wrong with the flags, the config or the run's folder before any rank starts.

    Returns whether there is something to train.
    """
    from wherry.finetune.config import build_config, check_arguments
    from wherry.train.job import given_config
    from wherry.train.report import make_folder, refuse_used

    check_arguments(options, options.method)
    build_config(options, options.method or "sft", given_config(options), bf16=False, ranks=options.nproc or 1)
    if options.run_dir is not None:
        folder = Path(options.run_dir)
        if options.resume is None:
            refuse_used(folder)
        make_folder(folder, "--run-dir")
        if options.resume is not None and (folder / FINISHED).exists():
            return not _finished(options, folder)
    return True


def _finished(options: Options, folder: Path) -> bool:
    """Whether nothing is left to train: an error, unless `auto` leaves it to the run whether there is."""
    start = find_checkpoint(options)
    state = json.loads((start / "trainer_state.json").read_text(encoding="utf-8")) if start is not None else {}
    if state.get("global_step", 0) < max(state.get("max_steps", 1), options.steps or 0):
        return False
    told = f"{folder} is finished, and its model is in {folder / FINISHED}; give more --steps, or another --run-dir"
    if options.resume != "auto":
        raise WherryError(f"--resume: {told}")
    print(told)
    return True


# Where a run goes on.


def find_checkpoint(options: Options) -> Path | None:
    """The checkpoint that --resume means: the newest whole one of a run, or the one named; none with `auto`."""
    if options.resume is None:
        return None
    named = Path(options.run_dir if options.resume == "auto" else options.resume)
    if options.resume != "auto" and not named.exists():
        raise WherryError(f"--resume {options.resume}: there is no such folder")
    if (named / "trainer_state.json").exists():
        if not _is_whole(named):
            raise WherryError(f"--resume {named}: it is not whole; name its run, and the newest whole one is taken")
        return named
    folder = named if named.name == IN_RUN else named / IN_RUN
    found = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        if _is_whole(path):
            return path
        logger.warning("%s: it is not whole, as of a run that was killed while it saved: an older one is taken", path)
    if options.resume != "auto":
        raise WherryError(f"--resume {options.resume}: there is no whole checkpoint of `wherry finetune` in it")
    return None


def _is_whole(folder: Path) -> bool:
    """The trainer's state is written last, and the engine knows its own checkpoints."""
    from wherry.checkpoint import folder as folders

    try:
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return any(folder.glob("rng_state*")) and folders.newest_whole(folder) is not None


class _Settled(NamedTuple):
    """The engine's config, what the plan has chosen of it, and bytes of a micro-batch's activations."""

    config: Config
    chosen: dict[str, Any]
    activations: int


class FineTuning:
    """The steps of a run, each of which needs what the ones before have found out."""

    def __init__(self, options: Options, folder: Path) -> None:
        import datasets
        import torch
        import transformers

        from wherry.parallel import topology
        from wherry.train.job import given_config

        transformers.logging.set_verbosity_error()  # what is to be told is told here
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|trl|peft")
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()
        self.options, self.folder = options, folder
        # As a model of it names its base, from wherever it is asked.
        self.name = str(Path(options.model).absolute()) if Path(options.model).exists() else options.model
        self.world: Topology = topology.find()
        self.comm, self.device = self.world.data, self.world.device
        self.chief = self.comm.rank == 0
        self.given = given_config(options)
        options.seed = DEFAULT_SEED if options.seed is None else options.seed
        has_bf16 = getattr(torch.get_device_module(self.device), "is_bf16_supported", None)
        self.bf16 = bool(self.device.type != "cpu" and has_bf16 and has_bf16())

    def run(self) -> int:
        from wherry.finetune.config import check_arguments
        from wherry.finetune.model import load
        from wherry.integrations.model_folder import read_tokenizer

        options = self.options
        self.bits = self._first(self._bits)
        start = self._first(lambda: find_checkpoint(options))
        self.tokenizer = read_tokenizer(self.folder, "finetune")
        self._complete_tokenizer()
        self.sequence = self._sequence()
        self.examples = self._examples()
        self.method = self.examples.method
        check_arguments(options, self.method)
        self._tell_data()
        self.place = self._first(self._place if start is None else self._place_before)
        self.config = self.place.config
        self.run_dir: Path = self._first(self._make_run_dir)
        return self._train(self._trainer(load(self.folder, self._dtype(), self.name, self.bits)), start)

    def _first(self, work: Callable[[], T]) -> T:
        """Done by rank 0; what comes of it, or what is wrong, on every rank."""
        from wherry.checkpoint.errors import on_first

        def told() -> T:
            try:
                return work()
            except WherryError as error:
                raise WherryError(str(error).removeprefix("finetune: ")) from error

        return on_first(self.comm, "finetune", told)

    # What to train on, and where.

    def _bits(self) -> int | None:
        """Of the weights beside the adapters: those of the folder, or as they are asked for."""
        from wherry.integrations.bits import bits_in

        held = bits_in(self.folder, "finetune", self.options.bits)
        if held is not None and self.options.lora is None:
            raise WherryError(
                f"finetune: {self.folder} has weights in {held} bits already, which cannot be trained themselves; add "
                "--lora, which trains adapters"
            )
        return held or self.options.bits

    def _complete_tokenizer(self) -> None:
        """With what TRL would take it from its arguments, and what the model says where a tokenizer says nothing."""
        from wherry.finetune.config import split

        given, tokenizer = split(self.options)[1]["sft"], self.tokenizer
        end = _told(self.folder).get("eos_token_id")
        if (named := given.get("eos_token")) is not None:
            tokenizer.eos_token = named
        elif tokenizer.eos_token is None and isinstance(end, int):
            # Said in a text it is this token then, and not its letters.
            tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(end)})
        if tokenizer.eos_token is None:
            raise WherryError(
                "finetune: neither the tokenizer nor the model's config has a token that ends a text; name one with "
                "--set sft.eos_token=TOKEN"
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        last, rows = max(tokenizer.get_vocab().values()), _told(self.folder).get("vocab_size")
        if rows is not None and last >= rows and self.chief:
            logger.warning(
                "tokens have ids up to %d, and the model has %d: a row that has one of the others fails", last, rows
            )
        if (file := given.get("chat_template_path")) is not None:
            try:
                tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
            except OSError as error:
                raise WherryError(f"--set sft.chat_template_path={file}: {error.strerror}") from None

    def _sequence(self) -> int:
        told = _told(self.folder)
        most = told.get("max_position_embeddings") or told.get("n_positions") or DEFAULT_SEQUENCE
        asked = self.options.seq_length
        if asked is not None and asked > most:
            raise WherryError(f"--seq-length {asked}: the model has {most} positions")
        return int(asked or min(DEFAULT_SEQUENCE, most))

    def _examples(self) -> Any:
        """Rank 0 first, which leaves what it has prepared in the cache."""
        from wherry.finetune.config import split
        from wherry.finetune.data import load_examples

        options = self.options
        prepare = partial(
            load_examples,
            options.data,
            options.method,
            self.tokenizer,
            eval_data=options.eval_data,
            eval_split=options.eval_split,
            seed=options.seed,
            sequence=self.sequence,
            columns=columns_of(options.columns),
            skip_bad=options.skip_bad_rows,
            samples=options.samples,
            keep_end=split(options)[1]["sft"].get("truncation_mode") == "keep_end",
        )
        found: list[Any] = []
        self._first(lambda: found.append(prepare()))
        return found[0] if found else prepare()

    def _tell_data(self) -> None:
        from wherry.finetune.data import show_example
        from wherry.observe.screen import Screen

        if not self.chief:
            return
        screen, examples = Screen(highlight=False), self.examples
        screen.print(f"{examples.source}; {examples.format}", markup=False)
        notes = [*self.options.notes, *examples.notes]
        if self.options.eval_interval and examples.evaluation is None:
            notes.append("--eval-interval: there are no rows to evaluate on")
        for note in notes:
            screen.print(f"note: {note}", markup=False, style="dim")
        for what, ids, labels in examples.shown:
            screen.print(f"an example{f', {what}' * bool(what)}:", markup=False)
            screen.print(show_example(ids, labels, self.tokenizer, width=min(120, screen.width)))

    def _adapt(self, lora: str | None, bits: int | None) -> Callable[[Any], Any] | None:
        if lora is None:
            return None
        import peft
        import torch

        from wherry.integrations.bits import to_bits

        config, dtype = self._lora(lora), self._config().working_dtype() or torch.float32

        def adapted(model: Any) -> Any:
            model = model if bits is None else to_bits(model, bits, dtype, "finetune")
            try:
                return peft.get_peft_model(model, config)
            except ValueError as error:  # as of layers that the model does not have
                raise WherryError(f"--lora: {' '.join(str(error).split())}") from error

        return adapted

    def _lora(self, lora: str | None) -> Any:
        from wherry.finetune.config import split
        from wherry.finetune.model import lora_config

        return None if lora is None else lora_config(lora, split(self.options)[1]["lora"])

    def _lighter(self, base: ModelSource, rows: int) -> dict[str, ModelSource]:
        """What may fit where this does not, by its flags."""
        from wherry.finetune.place import source_for
        from wherry.integrations import bits

        adapted, lora = self.options.lora is not None, self.options.lora or ""
        found = {} if adapted else {"--lora": self._adapt("", None)}
        if self.bits is None and bits.is_here():
            found["--bits 4" if adapted else "--lora --bits 4"] = self._adapt(lora, 4)
        return {flags: source_for(base, adapt, rows) for flags, adapt in found.items()}

    def _config(self) -> Config:
        from wherry.finetune.config import build_config

        return build_config(self.options, self.method, self.given, bf16=self.bf16, ranks=self.comm.size)

    def _place(self) -> _Settled:
        from wherry.finetune.place import as_table, order_of, place, source_for
        from wherry.observe.screen import Screen
        from wherry.plan.probe import disk_folder, this_machine
        from wherry.sources import find

        options, config = self.options, self._config()
        rows = 2 if self.method == "dpo" else 1
        base = find(str(self.folder.absolute()))
        source = source_for(base, self._adapt(options.lora, self.bits), rows, with_reference=self._has_reference())
        screen = Screen()
        with screen.status("looking for where everything rests"):
            machine = this_machine(disk_folder(config, options.nvme_path), every_gpu=True)
            machine = machine.with_host_memory(config.wherry.host_memory)
            placed = place(
                config, source, machine, self.comm.size, self.sequence, options.nvme_path, self._lighter(base, rows)
            )
        screen.print(as_table(placed))
        screen.print(order_of(placed), style="dim", markup=False)
        return _Settled(placed.config, dict(placed.values), placed.activations)

    def _place_before(self) -> _Settled:
        """Of a run that goes on: its file has what was chosen then."""
        run = Path(self.options.run_dir or "") / "run.json"
        told = json.loads(run.read_text(encoding="utf-8")) if run.exists() else {}
        return _Settled(self._config(), {}, int(told.get("activations", 0)))

    def _make_run_dir(self) -> Path:
        from wherry.train.report import make_run_dir

        name = f"{Path(self.name).name}-{self.method}{'-lora' if self.options.lora is not None else ''}"
        return make_run_dir(self.options.run_dir, name, resumes=self.options.resume is not None)

    def _dtype(self) -> Any:
        import torch

        return self.config.working_dtype() or torch.float32

    @property
    def readers(self) -> int:
        """Ranks that have different rows."""
        return self.config.readers(self.comm.size)

    def _has_reference(self) -> bool:
        return self.method == "dpo" and self.options.lora is None

    # The trainer.

    def _trainer(self, model: Any) -> Any:
        import torch

        from wherry.finetune.config import set_length, trainer_arguments
        from wherry.finetune.model import load
        from wherry.finetune.trainers import trainer_class

        arguments = trainer_arguments(
            self.options, self.method, self.config, self.sequence, self.run_dir,
            cpu=self.device.type == "cpu", ranks=self.comm.size, evaluates=self.examples.evaluation is not None,
        )  # fmt: skip
        torch.manual_seed(self.options.seed)
        # Of adapters the reference is the model without them.
        more = {"ref_model": load(self.folder, self._dtype(), self.name)} if self._has_reference() else {}
        try:
            trainer = trainer_class(self.method)(
                **more,
                model=model,
                args=arguments,
                train_dataset=self.examples.train,
                eval_dataset=self.examples.evaluation,
                processing_class=self.tokenizer,
                peft_config=self._lora(self.options.lora),
                wherry_config=self.config,
            )
        except (ImportError, ValueError) as error:  # of what does not go together, or is not installed
            raise WherryError(f"finetune: TRL does not take this: {' '.join(str(error).split())}") from error
        set_length(trainer.args, self.options, len(trainer.train_dataset), self.readers)
        return trainer

    def _train(self, trainer: Any, start: Path | None) -> int:
        from transformers.trainer_callback import PrinterCallback

        from wherry.finetune.following import Following
        from wherry.finetune.samples import SampleAnswers
        from wherry.train.loop import Ending, Stop

        stop, options = Stop(), self.options
        file = self.run_dir / "samples.jsonl" if self.chief else None
        samples = SampleAnswers(self.examples.prompts, self.tokenizer, self.sequence, file)
        make = partial(self._report, trainer, stop, start) if self.chief else None
        following = Following(
            trainer, stop, samples, make, saves=not options.no_save, evaluates_often=bool(options.eval_interval)
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(following)
        outcome = following.outcome
        with stop:
            try:
                if start is None or not trainer.is_last(start):
                    trainer.train(resume_from_checkpoint=None if start is None else str(start))
                else:  # killed before its model was written
                    trainer.restore(start)
                    following.on_train_begin(trainer.args, trainer.state, trainer.control)
                    following.on_train_end(trainer.args, trainer.state, trainer.control)
                if outcome.ending is Ending.FINISHED:
                    outcome.ending = Ending.FAILED  # until there is what it was for
                    self._finish(trainer, following)
                    outcome.ending = Ending.FINISHED
            except NonFiniteError as error:  # on every rank
                outcome.ending = Ending.DIVERGED
                if self.chief:
                    logger.error("%s", error)
            except ImportError as error:  # of what an argument of TRL's asks for
                raise WherryError(f"finetune: {' '.join(str(error).split())}") from error
            except (KeyboardInterrupt, SystemExit):
                outcome.ending = Ending.INTERRUPTED
                raise
            finally:
                if following.report is not None:
                    following.report.end(outcome)
        trainer.engine.close()
        self.comm.close()
        if outcome.ending is Ending.INTERRUPTED:
            return stop.status
        return 0 if outcome.ending is Ending.FINISHED else 1

    def _finish(self, trainer: Any, following: Any) -> None:
        import torch

        from wherry.finetune.model import write
        from wherry.finetune.report import card_of
        from wherry.integrations.model_folder import stored

        dtype = self.config.working_dtype()
        if dtype is None:
            held = stored(self.folder)[2]
            dtype = held if held in (torch.bfloat16, torch.float16) else torch.bfloat16
        card = partial(card_of, self, trainer, following.outcome)
        write(trainer.engine, trainer, self.tokenizer, self.run_dir, dtype, card)

    def _report(self, trainer: Any, stop: Any, start: Path | None, steps: int) -> Any:
        import yaml

        from wherry.finetune.report import facts_of, then_of
        from wherry.train.report import Report, Reported, count

        options = self.options
        about = as_file(options, self.place.chosen)
        (self.run_dir / FILE).write_text(yaml.safe_dump(about, sort_keys=False), encoding="utf-8")
        how = "LoRA of" if options.lora is not None else "all of"
        how += f" {self.bits} bits of" if self.bits is not None else ""
        title = f"{self.method}: {how} {Path(self.name).name} on {count(self.comm.size, 'rank')}"
        args = trainer.args
        run = Reported(
            title, self.run_dir, steps, options.log_interval, args.logging_steps,
            facts_of(self, trainer, start), self.place.activations, {"options": about}, partial(then_of, self),
        )  # fmt: skip
        return Report(trainer.engine, run, trainer.engine.config, stop)


def columns_of(text: str | None) -> dict[str, str]:
    """`prompt=question,completion=answer`."""
    found = dict(part.partition("=")[::2] for part in filter(None, (text or "").split(",")))
    for ours, theirs in found.items():
        if not theirs:
            raise WherryError(f"--columns: expected NAME=COLUMN, like prompt=question, got {ours!r}")
    return found


def _told(folder: Path) -> dict[str, Any]:
    """The model's config, or its part that is of text."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return values.get("text_config") or values
