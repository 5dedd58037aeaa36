from wherry.compat.deepspeed.launcher import ENVIRONMENT_FILE as DEEPSPEED_ENVIRONMENT_NAME
from wherry.compat.deepspeed.launcher import build_parser, main

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "build_parser", "main"]

if __name__ == "__main__":
    raise SystemExit(main())
