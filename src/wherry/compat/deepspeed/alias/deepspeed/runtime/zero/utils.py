def is_zero_param(parameter):
    """Whether a parameter is partitioned."""
    return hasattr(parameter, "ds_id")
