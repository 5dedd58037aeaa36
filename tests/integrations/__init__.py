# Modules of Hugging Face that programs of the tests import; one process of a test worker has them, and is forked.
HUGGING_FACE = (
    *("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama", "peft", "datasets"),
    *("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer"),
    *("torch._inductor.compiler_bisector", "torch._functorch.partitioners"),  # imported by torch.compile
)
