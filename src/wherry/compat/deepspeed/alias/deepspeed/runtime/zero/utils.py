def is_zero_param(parameter: object) -> bool:
    """Whether a parameter is partitioned."""
    return hasattr(parameter, "ds_id")
