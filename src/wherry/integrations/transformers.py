"""Hugging Face's Trainer on the engine.

    from wherry.integrations.transformers import WherryTrainer

    config = {"zero_optimization": {"stage": 3}}
    trainer = WherryTrainer(model=model, args=args, train_dataset=data, wherry_config=config)
    trainer.train()

Another Trainer class (TRL's, or one of your own) becomes one by its base classes:

    class Trainer(WherryMixin, SFTTrainer): ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import nn
from torch.utils.data import DataLoader

from wherry import config as configs
from wherry.build import initialize, without_layer_major
from wherry.config import Config
from wherry.engine import Engine
from wherry.errors import ConfigError, WherryError
from wherry.nn.context_parallel import IGNORED, whole_loss
from wherry.nn.lazy_logits import why_not
from wherry.parallel import topology
from wherry.placement import Tier
from wherry.sharding.access import gathered
from wherry.sharding.meta import StayingInMemory
from wherry.sharding.watched_params import Mark
from wherry.tiers.streams import can_pin

__all__ = ["StayingInMemory", "WherryMixin", "WherryTrainer"]

SCHEDULER_FILE = "scheduler.pt"
Source = str | os.PathLike[str] | Mapping[str, Any] | Config | None


class _LoopOptimizer(AcceleratedOptimizer):
    """The engine's optimizer, as Accelerate holds one: it steps at the window's end, and says when it skipped."""

    _is_accelerate_prepared = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    @property
    def step_was_skipped(self) -> bool:
        return bool(self.optimizer.overflow)


class _Travelling(Mark):
    """On a model that generates: true while each of its forwards gathers weights from all ranks."""

    __slots__ = ()

    def __bool__(self) -> bool:
        engine = self()
        return engine is not None and not (engine.closed or engine.is_generating())

    def __reduce__(self) -> Any:
        return bool, ()


def _generate_together(engine: Engine) -> None:
    """Have `generate` go on until every rank is done with its own, as it does for weights that FSDP has cut."""
    if engine.placement.parameters.partitioned and engine.comm.size > 1:
        for module in engine.module.modules():
            if hasattr(type(module), "generate"):
                module._is_fsdp_managed_module = _Travelling(engine)  # type: ignore[assignment]


class WherryMixin:
    """What a Trainer needs to train on the engine. `wherry_config`: a path, a dict, or nothing for ZeRO-3.

    Batch sizes, clipping, precision, learning rate and schedule are the TrainingArguments'; where the config has a key
    for one of them it must be "auto" or agree. `trainer.engine` is the engine, from the beginning of `train`, or of
    `evaluate` where that partitions the weights.
    """

    engine: Engine | None = None
    # The Trainer's own.
    args: Any
    accelerator: Any
    model: Any
    optimizer: Any
    state: Any
    push_to_hub: Any
    label_smoother: Any
    compute_loss_func: Any
    _save: Any

    def __init__(self, *args: Any, wherry_config: Source = None, **kwargs: Any) -> None:
        source = {"zero_optimization": {"stage": 3}} if wherry_config is None else wherry_config
        self._wherry_config = configs.load(source)
        self._max_steps = 0
        # The forwards of a window that wait to run together, and losses whose backward is of all of them.
        self._forwards: list[Callable[[], torch.Tensor]] = []
        self._losses: list[torch.Tensor] = []
        with StayingInMemory():  # what PEFT draws around a model on the meta device
            super().__init__(*args, **kwargs)
        if self.args.device.type != "cpu" and not can_pin():
            self.args.dataloader_pin_memory = False
        if self.get_cp_size() > 1:
            self._check_loss()
        if self.args.load_best_model_at_end and self.args.save_only_model:
            raise WherryError(
                "load_best_model_at_end reads the engine's checkpoints, and save_only_model leaves them out; set one "
                "of the two to False"
            )

    # What the engine places, and the accelerator does not.

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.prepare_model = self._prepare_model
        if self.get_cp_size() > 1:
            self.accelerator.prepare_data_loader = self._prepare_data_loader

    def _prepare_model(self, model: nn.Module, *args: Any, evaluation_mode: bool = False, **kwargs: Any) -> nn.Module:
        """Accelerate's own; but a second model, as TRL's reference, rests where the first one does, in an engine."""
        if not (evaluation_mode and self._rests_elsewhere(model)):
            cls = type(self.accelerator)
            return cls.prepare_model(self.accelerator, model, *args, evaluation_mode=evaluation_mode, **kwargs)
        model.requires_grad_(False)
        place = topology.find(device=self.args.device, timeout=self._wherry_config.wherry.timeout_s)
        config = configs.load(self._wherry_config, overrides={"optimizer": None, "scheduler": None})
        return initialize(model=model, config=resolve(config, self.args, 0), mesh=place)[0]

    def _rests_elsewhere(self, model: nn.Module) -> bool:
        parameters = self._wherry_config.placement().parameters
        lazy = any(parameter.is_meta for parameter in model.parameters())
        return parameters.partitioned or parameters.tier is not Tier.DEVICE or lazy

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The engine places the model, a unit at a time."""

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        self._max_steps = max_steps
        self._forwards, self._losses = [], []  # of a window that an earlier training has not ended
        if self.engine is not None and self.engine.module is not self.model:
            self.engine.close()  # with `model_init` every training has a model of its own
            self.engine = None
        return super()._prepare_for_training(max_steps, *args, **kwargs)  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.engine is not None and self.engine.optimizer is not None:
            return self.optimizer
        if self._wherry_config.optimizer is not None:
            return None
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.engine is not None and self.engine.lr_scheduler is not None:
            self.lr_scheduler = self.engine.lr_scheduler
            return self.lr_scheduler
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if self.engine is not None and (self.engine.optimizer is not None or not training):
            return self.engine
        if training:
            self._start_to_train()
        elif self._wherry_config.placement().parameters.partitioned or self.get_cp_size() > 1:
            config = configs.load(self._wherry_config, overrides={"optimizer": None, "scheduler": None})
            self.engine = self._build_engine(resolve(config, self.args, 0), None)
        return self.engine if self.engine is not None else model

    def _start_to_train(self) -> None:
        if self.engine is not None:
            self.engine.unwrap()  # it was for an evaluation, and has no optimizer
        given = self.optimizer.optimizer if isinstance(self.optimizer, AcceleratedOptimizer) else self.optimizer
        config = resolve(self._wherry_config, self.args, self._max_steps)
        if self._has_adapter and hasattr(self, "ref_model"):
            config = without_layer_major(config, f"{type(self).__name__} turns adapters off and on within a forward")
        self.engine = self._build_engine(config, given)
        assert self.engine.optimizer is not None
        self.optimizer = _LoopOptimizer(self.engine.optimizer)
        # The accelerator would divide and scale the loss, and run its backward, by itself.
        self.accelerator.backward = self._backward

    def _build_engine(self, config: Config, optimizer: torch.optim.Optimizer | None) -> Engine:
        # Batches come to the Trainer's device, which is not always torch's own choice.
        place = topology.find(device=self.args.device, timeout=config.wherry.timeout_s)
        if _written(self._wherry_config, "wherry.chunked_loss") is None and why_not(self.model) is None:
            config = configs.load(config, overrides={"wherry.chunked_loss": True})
        engine, *_ = initialize(model=self.model, optimizer=optimizer, config=config, mesh=place)
        _generate_together(engine)
        self.accelerator.unwrap_model = self._unwrap_model
        dynamo = self.accelerator.state.dynamo_plugin
        if dynamo.backend != DynamoBackend.NO:
            engine.compile(**dynamo.to_kwargs())
        return engine

    def _unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's own, which knows its own wrappers. A Trainer asks the model's class how to compute its loss."""
        inner = model.module if isinstance(model, Engine) else model
        return type(self.accelerator).unwrap_model(self.accelerator, inner, *args, **kwargs)

    # Ranks that share sequences.

    def get_cp_size(self) -> int:
        """How many ranks have the same samples; the Trainer counts by it."""
        return self._wherry_config.wherry.context_parallel

    def _prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """Accelerate's own, with the same batches for ranks that share them."""
        accelerator, together = self.accelerator, self.get_cp_size()
        if data_loader in accelerator._dataloaders:
            return data_loader
        if accelerator.dispatch_batches:
            raise WherryError(
                "wherry.context_parallel: dispatch_batches has one rank read for all, and ranks that share rows read "
                "the same ones; leave it out"
            )
        prepared = prepare_data_loader(
            data_loader,
            accelerator.device,
            num_processes=accelerator.num_processes // together,
            process_index=accelerator.process_index // together,
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
            non_blocking=accelerator.non_blocking,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        together = self.get_cp_size()
        if together == 1 or "labels" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        if num_items_in_batch is None:  # this rank's loss is over what all of them have
            ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            num_items_in_batch = (inputs["labels"][:, 1:] != IGNORED).sum() * ranks / together
        loss = super().compute_loss(model, inputs, False, num_items_in_batch)  # type: ignore[misc]
        assert self.engine is not None
        loss = whole_loss(loss, self.engine.topology.context)
        return (loss, {}) if return_outputs else loss

    def _check_loss(self) -> None:
        """Refuse what computes a loss of its own from whole rows."""
        those_of_trl = (cls for cls in type(self).__mro__ if cls.__module__.startswith("trl."))
        of_rows = [cls.__name__ for cls in those_of_trl if "compute_loss" in vars(cls) and cls.__name__ != "SFTTrainer"]
        of_rows += ["label_smoothing_factor"] if self.label_smoother is not None else []
        of_rows += ["compute_loss_func"] if self.compute_loss_func is not None else []
        if of_rows:
            raise WherryError(
                f"wherry.context_parallel: {of_rows[0]} computes a loss from whole rows, and ranks that share "
                "rows have their parts; set it to 1"
            )

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if self.get_cp_size() > 1:
            if not (prediction_loss_only or self.args.prediction_loss_only):
                raise WherryError(
                    "wherry.context_parallel: predictions are of whole rows, and ranks that share rows have their "
                    "parts; evaluate the loss alone (prediction_loss_only, no compute_metrics), or set it to 1"
                )
            self.gather_function = self._gather_once
        return super().evaluation_loop(dataloader, description, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]

    def _gather_once(self, values: torch.Tensor) -> torch.Tensor:
        """Of all ranks that have different samples, without those that fill up the last batch."""
        of_ranks = self.accelerator.gather(values).chunk(self.accelerator.num_processes)
        once, state = torch.cat(of_ranks[:: self.get_cp_size()]), self.accelerator.gradient_state
        return once[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else once

    # A step.

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        engine = self.engine
        if engine is None or not engine.layer_major:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        self._forwards.append(partial(self._forward, model, inputs, num_items_in_batch))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        forwards, self._forwards = self._forwards, []
        engine.set_gradient_accumulation_boundary(True)
        return sum(loss.detach() for loss in engine.backward_together(forwards, scale_wrt_gas=False))  # type: ignore[return-value]

    def _forward(self, *args: Any) -> torch.Tensor:
        """The Trainer's own step, but for the backward."""
        super().training_step(*args)  # type: ignore[misc]
        return self._losses.pop()

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        assert self.engine is not None
        if self.engine.layer_major:
            self._losses.append(loss)
            return
        self.engine.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
        # The Trainer has divided the loss by the micro-batches of the window, of which the last may have fewer.
        self.engine.backward(loss, scale_wrt_gas=False)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """The engine clips, in the update."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """The norm is known once the update has begun."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        norm = self.engine.get_global_grad_norm() if self.engine is not None else grad_norm
        super()._maybe_log_save_evaluate(tr_loss, norm, *args, **kwargs)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        output = super().train(*args, **kwargs)  # type: ignore[misc]
        if self.engine is not None:
            self.engine.settle()  # a delayed update has no next step to follow in
        return output

    # Saving and resuming.

    @property
    def _has_adapter(self) -> bool:
        """Whether the frozen weights are somebody else's, whom PEFT's adapter names."""
        return hasattr(self.model, "peft_config")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.engine is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        frozen_stay_out = self.engine.placement.parameters.partitioned and self._has_adapter
        if self.args.save_on_each_node:
            state: dict[str, Any] | None = self.engine.module.state_dict()
        else:  # on rank 0 alone
            state = self.engine.consolidated_state_dict(exclude_frozen_parameters=frozen_stay_out)
        # PEFT asks for the state dicts of layers that it trains whole, on the rank that saves.
        trained = [p for p in self.model.parameters() if p.requires_grad] if self._has_adapter else []
        with gathered(trained):
            if self.args.should_save:
                self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        self.engine.save_checkpoint(output_dir, exclude_frozen_parameters=self._has_adapter)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_FILE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights come with the engine's checkpoint, once there is an engine."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._load(checkpoint)
        schedule = os.path.join(checkpoint, SCHEDULER_FILE)
        if os.path.exists(schedule):
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))

    def _load_best_model(self) -> None:
        self._load(self.state.best_model_checkpoint, weights_alone=True)

    def _load(self, folder: str, weights_alone: bool = False) -> None:
        assert self.engine is not None
        path, _ = self.engine.load_checkpoint(
            folder, load_module_strict=not self._has_adapter, load_module_only=weights_alone
        )
        if path is None:
            raise WherryError(
                f"{folder}: holds no checkpoint of the engine's; one that another Trainer wrote has weights that "
                "from_pretrained reads"
            )


class WherryTrainer(WherryMixin, transformers.Trainer):
    """`transformers.Trainer` on the engine."""


def resolve(config: Config, args: transformers.TrainingArguments, max_steps: int) -> Config:
    """The config with what the TrainingArguments say. Where both say something else, all of it is told at once."""
    overrides: dict[str, Any] = {}
    differences = []

    def agree(path: str, value: Any, name: str) -> None:
        found = _written(config, path)
        if found in (None, "auto"):
            overrides[path] = value
        elif found != value:
            differences.append(f"{path}: the config has {found!r}, and TrainingArguments {value!r} ({name})")

    agree("train_micro_batch_size_per_gpu", args.train_batch_size, "per_device_train_batch_size")
    agree("gradient_accumulation_steps", args.gradient_accumulation_steps, "gradient_accumulation_steps")
    ranks = config.readers(args.world_size)
    total = args.train_batch_size * args.gradient_accumulation_steps * ranks
    agree("train_batch_size", total, "the product of batch size, accumulation and ranks")
    agree("gradient_clipping", args.max_grad_norm, "max_grad_norm")
    agree("bf16.enabled", bool(args.bf16), "bf16")
    agree("fp16.enabled", bool(args.fp16), "fp16")
    if config.optimizer is not None:
        values = {
            "lr": args.learning_rate,
            "betas": [args.adam_beta1, args.adam_beta2],
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
        }
        if config.optimizer.type == "Adafactor":
            del values["eps"]  # which is another there, and two numbers
        # An optimizer of type "auto" is the arguments' in all that is not said otherwise.
        absent = ("auto", None) if "optimizer.type" in config.auto else ("auto",)
        for key, value in values.items():
            if _written(config, f"optimizer.params.{key}") in absent:
                overrides[f"optimizer.params.{key}"] = value
    if config.scheduler is not None:
        values = {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": args.learning_rate,
            "warmup_num_steps": args.get_warmup_steps(max_steps),
            "total_num_steps": max_steps,
        }
        for key, value in values.items():
            if _written(config, f"scheduler.params.{key}") == "auto":
                overrides[f"scheduler.params.{key}"] = value
    if differences:
        raise ConfigError(
            'the config and the TrainingArguments differ; write "auto" in the config, or make them equal:\n'
            + "\n".join(differences)
        )
    return configs.load(config, overrides=overrides)


def _written(config: Config, path: str) -> Any:
    """What was given for a key, or None."""
    found: Any = config.written
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
