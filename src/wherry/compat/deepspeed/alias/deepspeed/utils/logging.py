from wherry.compat.deepspeed.utilities import (
    LoggerFactory,
    log_dist,
    print_json_dist,
    set_log_level_from_string,
)
from wherry.observe.log import logger
