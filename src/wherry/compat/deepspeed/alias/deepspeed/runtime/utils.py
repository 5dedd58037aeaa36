from torch.nn.utils import clip_grad_norm_

from wherry.compat.deepspeed.utilities import see_memory_usage
