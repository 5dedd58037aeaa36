from wherry.compat.deepspeed.utilities import log_dist, print_json_dist
from wherry.observe.log import logger


class LoggerFactory:
    """Scripts make their loggers with it."""

    @staticmethod
    def create_logger(name=None, level=20):
        import logging

        made = logging.getLogger(name)
        made.setLevel(level)
        return made


def set_log_level_from_string(level, custom_logger=None):
    (custom_logger or logger).setLevel(level.upper())
