"""DeepSpeed's default names of a monitor's runs."""

JOB_NAME_DEFAULT, WANDB_PROJECT_DEFAULT = "DeepSpeedJobName", "deepspeed"
