from wherry.compat.deepspeed.utilities import instrument_w_nvtx
