from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
INFERENCE_GENERIC_MODE = "generic"
default_pg_timeout = timedelta(minutes=30)
